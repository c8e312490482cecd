"""Every rank's block visits every rank of an axis, and what they compute for it comes back to its owner as a sum.

    rotation = workspace(axis, part, "rotation").rotate(part, counts, torch.float32)
    for owner, block in rotation:  # this rank, then the one before it, and so on
        gradient = ...  # of the owner's block
        if owner == axis.rank:
            own = gradient
        else:
            rotation.add(owner, gradient)
    total = rotation.total(own)

Blocks are flat, rank r's of counts[r] elements. A block is valid until the next one is asked for. The sum over ranks is
taken in one order: owner + 1, owner + 2, …, and the owner last, so that it always has the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hpctrain.comm.buffers import Work
from hpctrain.comm.collectives import all_gather_start, reduce_scatter
from hpctrain.comm.point_to_point import recv_start, send_start
from hpctrain.comm.windows import Window
from hpctrain.grid import Axis

BLOCKS, SUMS = 1, 2  # tags
_ALIGNED = 64  # bytes


class LocalRotation:
    """That of an axis with one rank; the methods that all kinds have."""

    def __init__(self, part: torch.Tensor, axis: Axis):
        self.part, self.axis = part, axis

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(owner, block) of every rank, this one's first."""
        yield self.axis.rank, self.part

    def progress(self) -> None:
        """Let MPI go on with what is under way."""

    def add(self, owner: int, part: torch.Tensor) -> None:
        """Add what this rank has computed for the block that came last, another's."""

    def total(self, own: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks for this rank's block, of which `own` is this rank's part; may change `own`."""
        return own


class HopRotation:
    """Blocks go from rank to rank by messages, the next one while this one is worked on. Sums follow them.

    Two blocks and two sums are in memory at a time, whatever the number of ranks.
    """

    def __init__(self, part: torch.Tensor, axis: Axis, counts: tuple[int, ...], sum_dtype: torch.dtype | None):
        self.part, self.axis, self.counts, self.dtype = part, axis, counts, sum_dtype
        self._before, self._after = (axis.rank - 1) % axis.size, (axis.rank + 1) % axis.size
        self._under_way: list[Work[None] | Work[torch.Tensor]] = []
        self._sum: Work[torch.Tensor] | None = None
        self._sent: Work[None] | None = None

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        rank, size = self.axis.rank, self.axis.size
        block = self.part
        for hop in range(size):
            owner = (rank - hop) % size
            self._under_way = []
            if hop + 1 < size:
                sending = send_start(block, self.axis, self._after, BLOCKS)
                arriving = block.new_empty(self.counts[owner - 1])
                receiving = recv_start(arriving, self.axis, self._before, BLOCKS)
                self._under_way = [sending, receiving]
            if hop > 1 and self.dtype is not None:
                self._sum = self._expect(owner)
            yield owner, block
            if hop + 1 < size:
                sending.wait()
                block = receiving.wait()

    def progress(self) -> None:
        for work in self._under_way:
            work.test()

    def add(self, owner: int, part: torch.Tensor) -> None:
        total = part.to(self.dtype)
        if self._sum is not None:
            total = self._sum.wait().add_(total)
        self._send(total)

    def total(self, own: torch.Tensor) -> torch.Tensor:
        own.add_(self._expect(self.axis.rank).wait())
        assert self._sent is not None  # there are other ranks, and so other blocks
        self._sent.wait()
        return own

    def _expect(self, owner: int) -> Work[torch.Tensor]:
        sums = torch.empty(self.counts[owner], dtype=self.dtype, device=self.part.device)
        return recv_start(sums, self.axis, self._before, SUMS)

    def _send(self, total: torch.Tensor) -> None:
        if self._sent is not None:
            self._sent.wait()
        self._sent = send_start(total, self.axis, self._after, SUMS)


class GatherRotation:
    """All blocks come at once, and the sums go back at once: fewer and larger messages, all blocks in memory."""

    def __init__(self, part: torch.Tensor, axis: Axis, counts: tuple[int, ...], sum_dtype: torch.dtype | None):
        self.part, self.axis, self.counts = part, axis, counts
        self._gathering = all_gather_start(part, axis, counts)
        if sum_dtype is not None:
            self._whole = torch.empty(sum(counts), dtype=sum_dtype, device=part.device)
            self._sums = self._whole.split(counts)

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        rank, size = self.axis.rank, self.axis.size
        yield rank, self.part
        blocks = self._gathering.wait().split(self.counts)
        for hop in range(1, size):
            owner = (rank - hop) % size
            yield owner, blocks[owner]

    def progress(self) -> None:
        self._gathering.test()

    def add(self, owner: int, part: torch.Tensor) -> None:
        self._sums[owner].copy_(part)

    def total(self, own: torch.Tensor) -> torch.Tensor:
        self._sums[self.axis.rank].copy_(own)
        return reduce_scatter(self._whole, self.axis, self.counts)


class SharedMemoryRotation:
    """Blocks are read in place, and sums added in place, in a window of which every rank has the part of its own block.

    Nobody waits for all, but once, until they have written their blocks: who has added to a sum says so to the rank
    that does so next, by a message without content.
    """

    def __init__(
        self, window: Window, part: torch.Tensor, axis: Axis, counts: tuple[int, ...], sum_dtype: torch.dtype | None
    ):
        self.part, self.axis = part, axis
        self._window = window
        self._blocks = [memory[: n * part.itemsize].view(part.dtype) for memory, n in zip(window.parts, counts)]
        if sum_dtype is not None:
            places = [(aligned(n * part.itemsize), n * sum_dtype.itemsize) for n in counts]
            self._sums = [m[start : start + n].view(sum_dtype) for m, (start, n) in zip(window.parts, places)]
        self._blocks[axis.rank].copy_(part)
        self._written = window.barrier_start(lambda: None)
        self._written.owner = axis, "rotate", None
        self._said: list[Work[None]] = []
        others = sum(counts) - counts[axis.rank]
        moved = (axis.size - 1) * part.nbytes, others * part.itemsize
        axis.transport.traffic.add(axis.name, "all_gather", *moved)
        if sum_dtype is not None:
            moved = others * sum_dtype.itemsize, (axis.size - 1) * part.numel() * sum_dtype.itemsize
            axis.transport.traffic.add(axis.name, "reduce_scatter", *moved)

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        rank, size = self.axis.rank, self.axis.size
        yield rank, self.part
        self._written.wait()
        for hop in range(1, size):
            owner = (rank - hop) % size
            yield owner, self._blocks[owner]

    def progress(self) -> None:
        self._written.test()

    def add(self, owner: int, part: torch.Tensor) -> None:
        axis = self.axis
        if owner == (axis.rank - 1) % axis.size:  # the first to add to it
            self._sums[owner].copy_(part)
        else:
            self._turn()
            self._sums[owner].add_(part)
        self._window.memory_barrier()
        say = axis.comm.Issend if axis.transport.synchronous else axis.comm.Isend
        self._said.append(Work([say(b"", (axis.rank + 1) % axis.size, SUMS)], None))

    def total(self, own: torch.Tensor) -> torch.Tensor:
        self._turn()
        own.add_(self._sums[self.axis.rank])
        for work in self._said:
            work.wait()
        return own

    def _turn(self) -> None:
        """Wait until the rank before has added to the same sum."""
        axis = self.axis
        said = Work([axis.comm.Irecv(bytearray(0), (axis.rank - 1) % axis.size, SUMS)], None)
        said.owner = axis, "rotate", None
        said.wait()
        self._window.memory_barrier()


Rotation = LocalRotation | HopRotation | GatherRotation | SharedMemoryRotation


def aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED


def shared_nbytes(counts: tuple[int, ...], dtype: torch.dtype, sum_dtype: torch.dtype | None) -> int:
    """Bytes of the window that each rank needs."""
    most = max(counts)
    return aligned(most * dtype.itemsize) + (most * sum_dtype.itemsize if sum_dtype is not None else 0)
