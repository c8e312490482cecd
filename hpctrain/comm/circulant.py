"""Collectives in ⌈log2 p⌉ rounds on p ranks, for blocks so small that the number of messages counts.

In round k a rank sends to one that is 2^k further and receives from the one as far on the other side, several blocks at
once. Blocks that lie around the end of the tensor are two messages, so that there are at most 2 ⌈log2 p⌉. Gathering and
summing move p-1 blocks, as few as can be; an all-to-all moves up to p/2 ⌈log2 p⌉ of them.

A round begins when the one before is complete, and MPI does not go on by itself: these calls return when they are done.

Source: Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all communications in multiport
message-passing systems" (1997); Träff, "Optimal, non-pipelined reduce-scatter and allreduce algorithms" (2024).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from hpctrain.comm.buffers import message, wait
from hpctrain.comm.exchange import TAG
from hpctrain.grid import Axis

RANKS = 16  # fewer are not worth the rounds
BLOCK_BYTES = 16384  # what a larger block costs is not its message
SWAPPED_BYTES = 1024  # the same of an all-to-all, whose blocks travel several times


def pays(axis: Axis, counts: Sequence[int], row_bytes: int, limit: int = BLOCK_BYTES) -> bool:
    """Whether blocks of counts[r] rows for each rank r should go this way: small ones, of which all ranks have one.

    Where few ranks have all blocks, as of a parameter server, the others would carry what is none of theirs.
    """
    return axis.size >= RANKS and 0 < max(counts) * row_bytes <= limit and max(counts) - min(counts) <= 1


def all_gather(out: torch.Tensor, sizes: Sequence[int], axis: Axis) -> tuple[int, int]:
    """Fill `out`, which has this rank's block in its place, by those of the others; returns elements sent and received.

    Args:
        out: in memory that MPI can reach.
        sizes: elements of each rank's block.
    """
    edges = tuple(itertools.accumulate(sizes, initial=0))
    sent = received = 0
    for distance, blocks in reversed(_rounds(axis.size)):
        dest, source = (axis.rank - distance) % axis.size, (axis.rank + distance) % axis.size
        given, taken = _spans(edges, axis.rank, blocks), _spans(edges, source, blocks)
        _swap(axis, out, given, dest, out, taken, source)
        sent, received = sent + _length(given), received + _length(taken)
    return sent, received


def reduce_scatter(total: torch.Tensor, sizes: Sequence[int], axis: Axis) -> tuple[int, int]:
    """Add everybody's blocks to this rank's of `total`, and partial sums to the others; the adjoint of `all_gather`."""
    edges = tuple(itertools.accumulate(sizes, initial=0))
    flat, sent, received = total.view(-1), 0, 0
    for distance, blocks in _rounds(axis.size):
        dest, source = (axis.rank + distance) % axis.size, (axis.rank - distance) % axis.size
        given, taken = _spans(edges, dest, blocks), _spans(edges, axis.rank, blocks)
        arriving = flat.new_empty(_length(taken))
        lengths = [stop - start for start, stop in taken]
        places = list(zip(itertools.accumulate(lengths, initial=0), itertools.accumulate(lengths)))
        _swap(axis, total, given, dest, arriving, places, source)
        for (start, stop), (first, last) in zip(taken, places):
            flat[start:stop] += arriving[first:last]
        sent, received = sent + _length(given), received + _length(taken)
    return sent, received


def all_to_all(blocks: torch.Tensor, axis: Axis) -> tuple[torch.Tensor, int]:
    """Row r of the matrix `blocks` goes to rank r; returns those that came, in rank order, and the elements moved."""
    size, rank = axis.size, axis.rank
    travelling = blocks.roll(-rank, 0)  # row n has n ranks to go
    number, moved = torch.arange(size, device=blocks.device), 0
    for distance, _ in _rounds(size):
        rows = number[number & distance > 0]
        leaving = travelling[rows]
        arriving = torch.empty_like(leaving)
        whole = [(0, leaving.numel())]
        _swap(axis, leaving, whole, (rank + distance) % size, arriving, whole, (rank - distance) % size)
        travelling[rows] = arriving
        moved += leaving.numel()
    return travelling.flip(0).roll(rank + 1, 0), moved


def _rounds(ranks: int) -> list[tuple[int, int]]:
    """How far blocks go in each round, and how many of them, the farthest first.

    >>> _rounds(6)
    [(4, 2), (2, 2), (1, 1)]
    """
    distances = [1 << k for k in reversed(range((ranks - 1).bit_length()))]
    return [(distance, min(distance, ranks - distance)) for distance in distances]


Spans = list[tuple[int, int]]


def _spans(edges: Sequence[int], first: int, blocks: int) -> Spans:
    """Where `blocks` blocks from the first on lie, those after the last being the first again: no, one or two spans."""
    ranks = len(edges) - 1
    stop = first + blocks
    bounds = [(edges[first], edges[min(stop, ranks)]), (0, edges[max(stop - ranks, 0)])]
    return [(start, end) for start, end in bounds if start < end]


def _length(spans: Spans) -> int:
    return sum(stop - start for start, stop in spans)


def _swap(
    axis: Axis, give: torch.Tensor, given: Spans, dest: int, take: torch.Tensor, taken: Spans, source: int
) -> None:
    """Send spans of elements of `give`, and receive those of `take`."""
    requests = [axis.comm.Irecv(message(take, start, stop - start), source, TAG) for start, stop in taken]
    requests += [axis.comm.Isend(message(give, start, stop - start), dest, TAG) for start, stop in given]
    for request in requests:
        wait(request)
