"""Out-of-place gathers and sums of the caller's tensors: in shared memory where the axis is on one node, otherwise by
messages.

Tensors pass through the axis's workspace in pieces, so that this needs little of the node's shared memory, whatever
their size, and what was written is read again while it is in the cache. What is small goes by messages: a barrier of
ours takes longer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from hpctrain.comm import collectives, reductions
from hpctrain.comm.buffers import check_reducible
from hpctrain.comm.shared_memory_workspace import SharedMemoryWorkspace
from hpctrain.comm.timing import time_call
from hpctrain.comm.workspace import workspace
from hpctrain.grid import Axis

PIECE = 1 << 18  # elements of each rank
SMALL = 1 << 14  # bytes


def rows_of_all(x: torch.Tensor, axis: Axis, counts: Sequence[int]) -> torch.Tensor:
    """All ranks' rows, in rank order, on every rank."""
    row = math.prod(x.shape[1:])
    memory = shared_memory_for(x, axis, sum(counts) * row)
    if memory is None:
        return collectives.all_gather(x, axis, counts)
    return time_call(axis, "all_gather", _gather, x, axis, counts, memory)


def rows_of_sum(x: torch.Tensor, axis: Axis, counts: Sequence[int]) -> torch.Tensor:
    """This rank's rows of the sum over all ranks. Sums of float16 and bfloat16 are taken in float32."""
    check_reducible(x.dtype, "sum")
    memory = shared_memory_for(x, axis, x.numel())
    if memory is None:
        return collectives.reduce_scatter(x, axis, counts)
    return time_call(axis, "reduce_scatter", _reduce, x, axis, counts, memory)


def sum_of_all(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The sum over all ranks, on every rank, with the same bits; in the order of memory of a contiguous tensor. As
    `comm.all_reduce`, also where an algorithm was chosen for the axis."""
    check_reducible(x.dtype, "sum")
    memory = _memory_for_sum(x, axis, x.numel())
    if memory is None:
        return reductions.all_reduce(x.clone(memory_format=torch.contiguous_format), axis)
    return time_call(axis, "all_reduce", _sum, x, axis, memory)


def summand_for(shape: tuple[int, ...], axis: Axis, like: torch.Tensor) -> torch.Tensor:
    """Memory for this rank's summand, to be filled and given to `sum_of_summands` before anything else is sent along
    the axis. All of it is shared memory at once, where it is on one node."""
    memory = _memory_for_sum(like, axis, math.prod(shape))
    return like.new_empty(shape) if memory is None else memory.buffer(math.prod(shape), like).view(shape)


def sum_of_summands(summand: torch.Tensor, axis: Axis) -> torch.Tensor:
    """`sum_of_all` of what every rank wrote to its `summand_for`."""
    check_reducible(summand.dtype, "sum")
    memory = _memory_for_sum(summand, axis, summand.numel())
    if memory is None:
        return reductions.all_reduce(summand, axis)
    return time_call(axis, "all_reduce", _sum_in_place, summand, axis, memory)


def _memory_for_sum(like: torch.Tensor, axis: Axis, numel: int) -> SharedMemoryWorkspace | None:
    return None if axis in axis.transport.reducers else shared_memory_for(like, axis, numel)


def shared_memory_for(x: torch.Tensor, axis: Axis, numel: int) -> SharedMemoryWorkspace | None:
    """That of the axis, for what takes so many elements in all; None where messages are to be sent."""
    if axis.size == 1 or numel * x.itemsize < SMALL:
        return None
    found = workspace(axis, x)
    return found if isinstance(found, SharedMemoryWorkspace) else None


def _pieces(sizes: Sequence[int]) -> Iterator[tuple[slice, tuple[int, ...]]]:
    """Ranges of every rank's elements, of which there are `sizes`, and how many each rank has within."""
    for start in range(0, max(sizes), PIECE):
        yield slice(start, start + PIECE), tuple(max(0, min(PIECE, size - start)) for size in sizes)


def _gather(x, axis, counts, memory):
    collectives.check_own_count(counts, axis, len(x))
    sizes = [count * math.prod(x.shape[1:]) for count in counts]
    out, flat = x.new_empty((sum(counts), *x.shape[1:])), x.reshape(-1)
    parts = out.view(-1).split(sizes)
    for piece, lengths in _pieces(sizes):
        for part, came in zip(parts, memory.gather(flat[piece], lengths).split(lengths)):
            part[piece].copy_(came)
    return out


def _reduce(x, axis, counts, memory):
    collectives.check_counts(counts, axis, len(x))
    sizes = [count * math.prod(x.shape[1:]) for count in counts]
    out, parts = x.new_empty((counts[axis.rank], *x.shape[1:])), x.reshape(-1).split(sizes)
    for piece, lengths in _pieces(sizes):
        buffer = memory.buffer(sum(lengths), x)
        for place, part in zip(buffer.split(lengths), parts):
            place.copy_(part[piece])
        out.view(-1)[piece] = memory.reduce(buffer, lengths)
    return out


def _sum(x, axis, memory):
    out, flat = torch.empty_like(x, memory_format=torch.contiguous_format), x.reshape(-1)
    for given, place in zip(flat.split(PIECE), out.view(-1).split(PIECE)):
        memory.total(memory.buffer(len(given), given).copy_(given), place)
    _count(x, axis)
    return out


def _sum_in_place(summand, axis, memory):
    out = torch.empty_like(summand)
    memory.total(summand.view(-1), out.view(-1))
    _count(summand, axis)
    return out


def _count(x, axis):
    moved = 2 * (axis.size - 1) * x.nbytes // axis.size
    axis.transport.traffic.add(axis.name, "all_reduce", moved, moved)
