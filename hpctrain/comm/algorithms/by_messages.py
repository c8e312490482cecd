"""All-reduce over point-to-point messages, for any number of ranks.

Each algorithm is a generator: it begins messages, yields their requests, and goes on when they are complete. It
replaces a flat tensor by the sum over all ranks. One rank computes each element of it, so that all get the same bits.

Cost for n bytes on p ranks, with a seconds a message, b a byte sent and g a byte added; q is the largest power of two
that is at most p, and [p > q] one where p is no such power:

    algorithm     a                        b                          g
    naive         2 (p-1)                  2 (p-1) n                  (p-1) n            at the root
    ring          2 (p-1)                  2 (p-1)/p n                (p-1)/p n
    direct        2 (p-1)                  2 (p-1)/p n                (p-1)/p n
    rabenseifner  2 log2 q + 2 [p > q]     2 (q-1)/q n + 2 [p > q] n  (q-1)/q n + [p > q] n

Tensors of more than SEGMENT elements are taken in pieces of that many, one after another, so that what arrives is still
in the cache when it is added. Of `direct` all messages of one of its two steps are under way at once, so that its
part of a is small where a network or memory takes them together; those of the others wait for one another.

Source: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH" (2005);
Rabenseifner, "Optimization of Collective Reduction Operations" (2004), with the step for other numbers of ranks as in
the former.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from hpctrain.comm.buffers import REDUCED_HERE, message
from hpctrain.comm.windows import add_up
from hpctrain.grid import Axis
from hpctrain.shard import split_sizes

if TYPE_CHECKING:
    from mpi4py import MPI

SEGMENT = 1 << 22


class Link:
    """The messages of one all-reduce, which have a tag of their own; counted in the ledger under "all_reduce".

    Attributes: `rank` and `size` of the axis; `sent` and `received`, bytes.
    """

    def __init__(self, axis: Axis, tag: int):
        self.rank, self.size, self.sent, self.received = axis.rank, axis.size, 0, 0
        self._comm, self._tag = axis.comm, tag
        self._send = axis.comm.Issend if axis.transport.synchronous else axis.comm.Isend

    def send(self, tensor: torch.Tensor, dest: int) -> MPI.Request:
        self.sent += tensor.nbytes
        return self._send(message(tensor), dest, self._tag)

    def recv(self, tensor: torch.Tensor, source: int) -> MPI.Request:
        self.received += tensor.nbytes
        return self._comm.Irecv(message(tensor), source, self._tag)


def naive(x: torch.Tensor, link: Link) -> Iterator[list[MPI.Request]]:
    """The root receives and adds everybody's tensor, one after another, then sends the sum to them, one by one."""
    if link.rank > 0:
        yield [link.send(x, 0)]
        yield [link.recv(x, 0)]
        return
    total = x.float() if x.dtype in REDUCED_HERE else x
    arriving = torch.empty_like(x)
    for source in range(1, link.size):
        yield [link.recv(arriving, source)]
        total += arriving
    if total is not x:
        x.copy_(total)
    for dest in range(1, link.size):
        yield [link.send(x, dest)]


def ring(x: torch.Tensor, link: Link) -> Iterator[list[MPI.Request]]:
    """Sums travel round to their owner, part by part, each rank adding its own; then the parts travel round again."""
    p, rank = link.size, link.rank
    parts = x.split(split_sizes(x.numel(), p))
    right, left = (rank + 1) % p, (rank - 1) % p
    buffer = torch.empty_like(parts[0])
    for step in range(p - 1):
        mine = parts[(rank - step - 1) % p]
        arriving = buffer[: mine.numel()]
        yield [link.recv(arriving, left), link.send(parts[(rank - step) % p], right)]
        mine += arriving
    for step in range(p - 1):
        yield [link.recv(parts[(rank - step) % p], left), link.send(parts[(rank + 1 - step) % p], right)]


def direct(x: torch.Tensor, link: Link) -> Iterator[list[MPI.Request]]:
    """Each rank gets its part of everybody's tensor, adds them in the order of ranks, and sends the sum to all."""
    p, rank = link.size, link.rank
    parts = x.split(split_sizes(x.numel(), p))
    own, others = parts[rank], [(rank + step) % p for step in range(1, p)]
    summands = dict(zip(others, x.new_empty(p - 1, own.numel()))) | {rank: own}
    yield [link.recv(summands[r], r) for r in reversed(others)] + [link.send(parts[r], r) for r in others]
    add_up([summands[r] for r in range(p)], own)
    yield [link.recv(parts[r], r) for r in reversed(others)] + [link.send(own, r) for r in others]


def rabenseifner(x: torch.Tensor, link: Link) -> Iterator[list[MPI.Request]]:
    """Pairs of ranks exchange halves of what they have, add, and go on with the half of that; then all the way back.

    Of p ranks that are no power of two, the first 2 (p - q) begin by joining in pairs, of which one works for both.
    """
    rank = link.rank
    q = 1 << (link.size.bit_length() - 1)
    joined = 2 * (link.size - q)
    if rank < joined and rank % 2 == 0:
        yield [link.send(x, rank + 1)]
        yield [link.recv(x, rank + 1)]
        return
    buffer = torch.empty_like(x) if rank < joined else x.new_empty((x.numel() + 1) // 2 + q)
    if rank < joined:
        yield [link.recv(buffer, rank - 1)]
        x += buffer
    number = rank // 2 if rank < joined else rank - joined // 2  # among the q that work
    edges = tuple(itertools.accumulate(split_sizes(x.numel(), q), initial=0))

    def partner(distance: int) -> int:
        other = number ^ distance
        return 2 * other + 1 if other < joined // 2 else other + joined // 2

    low, high, distance = 0, q, q // 2  # parts that are still worked on
    while distance:
        middle = (low + high) // 2
        upper = bool(number & distance)
        give = x[edges[low] : edges[middle]] if upper else x[edges[middle] : edges[high]]
        low, high = (middle, high) if upper else (low, middle)
        keep = x[edges[low] : edges[high]]
        arriving = buffer[: keep.numel()]
        yield [link.recv(arriving, partner(distance)), link.send(give, partner(distance))]
        keep += arriving
        distance //= 2
    distance = 1
    while distance < q:
        first, last = (low - distance, low) if number & distance else (high, high + distance)
        mine, theirs = x[edges[low] : edges[high]], x[edges[first] : edges[last]]
        yield [link.recv(theirs, partner(distance)), link.send(mine, partner(distance))]
        low, high, distance = min(low, first), max(high, last), 2 * distance
    if rank < joined:
        yield [link.send(x, rank - 1)]
