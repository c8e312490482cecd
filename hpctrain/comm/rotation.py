"""Every rank's block visits every rank of an axis, and what they compute for it comes back to its owner as a sum.

    rotation = workspace(axis, part, "attention").rotate(part, counts, torch.float32)
    for owner, block in rotation:  # this rank, then the one before it, and so on
        rotation.sum().add_(gradient)  # any number of times, of the owner's block
    total = rotation.total()

Blocks are flat, rank r's of counts[r] elements. A block, and the sum to add to, are valid until the next block is asked
for. Each kind takes a sum in one order of the ranks, so that it always has the same bits.
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

    def __init__(self, part: torch.Tensor, axis: Axis, sum_dtype: torch.dtype | None):
        self.part, self.axis = part, axis
        if sum_dtype is not None:
            self._own = torch.zeros_like(part, dtype=sum_dtype)

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(owner, block) of every rank, this one's first."""
        yield self.axis.rank, self.part

    def progress(self) -> None:
        """Let MPI go on with what is under way."""

    def sum(self) -> torch.Tensor:
        """The sum for the block that came last, to add to in place; the first call for a block waits for the ranks
        that add before this one."""
        return self._own

    def total(self) -> torch.Tensor:
        """The sum over all ranks for this rank's block, once all blocks have come."""
        return self._own


class HopRotation:
    """Blocks go from rank to rank by messages, the next one while this one is worked on. Sums follow them.

    Besides a rank's own, two blocks and two sums are in memory at a time, whatever the number of ranks. The owner adds
    last.
    """

    def __init__(self, part: torch.Tensor, axis: Axis, counts: tuple[int, ...], sum_dtype: torch.dtype | None):
        self.part, self.axis, self.counts, self.dtype = part, axis, counts, sum_dtype
        self._before, self._after = (axis.rank - 1) % axis.size, (axis.rank + 1) % axis.size
        self._under_way: list[Work[None] | Work[torch.Tensor]] = []
        self._arriving: Work[torch.Tensor] | None = None
        self._sum: torch.Tensor | None = None
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
            if self.dtype is not None:
                self._begin_sum(owner, hop)
            yield owner, block
            if self.dtype is not None and hop:
                self._pass_on()
            if hop + 1 < size:
                sending.wait()
                block = receiving.wait()

    def progress(self) -> None:
        for work in self._under_way:
            work.test()

    def sum(self) -> torch.Tensor:
        if self._sum is None:
            assert self._arriving is not None
            self._sum = self._arriving.wait()
        return self._sum

    def total(self) -> torch.Tensor:
        self._own.add_(self._expect(self.axis.rank).wait())
        assert self._sent is not None  # there are other ranks, and so other blocks
        self._sent.wait()
        return self._own

    def _begin_sum(self, owner: int, hop: int) -> None:
        if hop > 1:
            self._arriving, self._sum = self._expect(owner), None
            return
        self._sum = torch.zeros(self.counts[owner], dtype=self.dtype, device=self.part.device)
        if hop == 0:
            self._own = self._sum

    def _expect(self, owner: int) -> Work[torch.Tensor]:
        sums = torch.empty(self.counts[owner], dtype=self.dtype, device=self.part.device)
        return recv_start(sums, self.axis, self._before, SUMS)

    def _pass_on(self) -> None:
        if self._sent is not None:
            self._sent.wait()
        self._sent = send_start(self.sum(), self.axis, self._after, SUMS)


class GatherRotation:
    """All blocks come at once, and the sums go back at once: fewer and larger messages, all blocks in memory."""

    def __init__(self, part: torch.Tensor, axis: Axis, counts: tuple[int, ...], sum_dtype: torch.dtype | None):
        self.part, self.axis, self.counts = part, axis, counts
        self._gathering = all_gather_start(part, axis, counts)
        self._owner = axis.rank
        if sum_dtype is not None:
            self._whole = torch.zeros(sum(counts), dtype=sum_dtype, device=part.device)
            self._sums = self._whole.split(counts)

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        rank, size = self.axis.rank, self.axis.size
        yield rank, self.part
        blocks = self._gathering.wait().split(self.counts)
        for hop in range(1, size):
            self._owner = (rank - hop) % size
            yield self._owner, blocks[self._owner]

    def progress(self) -> None:
        self._gathering.test()

    def sum(self) -> torch.Tensor:
        return self._sums[self._owner]

    def total(self) -> torch.Tensor:
        return reduce_scatter(self._whole, self.axis, self.counts)


class SharedMemoryRotation:
    """Blocks are read in place, and sums added in place, in a window of which every rank has the part of its own block.

    Nobody waits for all, but once, until they have written their blocks: who has added to a sum says so to the rank
    that does so next, by a message without content. The owner adds first.
    """

    def __init__(
        self, window: Window, part: torch.Tensor, axis: Axis, counts: tuple[int, ...], sum_dtype: torch.dtype | None
    ):
        self.part, self.axis, self.dtype = part, axis, sum_dtype
        self._window = window
        self._blocks = [memory[: n * part.itemsize].view(part.dtype) for memory, n in zip(window.parts, counts)]
        if sum_dtype is not None:
            places = [(aligned(n * part.itemsize), n * sum_dtype.itemsize) for n in counts]
            self._sums = [m[start : start + n].view(sum_dtype) for m, (start, n) in zip(window.parts, places)]
            self._sums[axis.rank].zero_()
        self._blocks[axis.rank].copy_(part)
        self._written = window.barrier_start(lambda: None)
        self._written.owner = axis, "rotate", None
        self._owner, self._waits = axis.rank, False
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
        self._pass_on()
        self._written.wait()
        for hop in range(1, size):
            self._owner, self._waits = (rank - hop) % size, True
            yield self._owner, self._blocks[self._owner]
            self._pass_on()
        if self.dtype is None:
            self._window.release()

    def progress(self) -> None:
        self._written.test()

    def sum(self) -> torch.Tensor:
        if self._waits:
            self._turn()
        return self._sums[self._owner]

    def total(self) -> torch.Tensor:
        self._turn()
        total = self._sums[self.axis.rank].clone()
        for work in self._said:
            work.wait()
        self._window.release()
        return total

    def _pass_on(self) -> None:
        """Say to the next rank that it may add to this sum; after the last one, to its owner that it is the total."""
        if self.dtype is None:
            return
        self.sum()
        axis = self.axis
        self._window.memory_barrier()
        say = axis.comm.Issend if axis.transport.synchronous else axis.comm.Isend
        self._said.append(Work([say(b"", (axis.rank + 1) % axis.size, SUMS)], None))

    def _turn(self) -> None:
        """Wait until the rank before has added to the same sum."""
        axis = self.axis
        said = Work([axis.comm.Irecv(bytearray(0), (axis.rank - 1) % axis.size, SUMS)], None)
        said.owner = axis, "rotate", None
        said.wait()
        self._window.memory_barrier()
        self._waits = False


Rotation = LocalRotation | HopRotation | GatherRotation | SharedMemoryRotation


def aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED


def shared_nbytes(counts: tuple[int, ...], dtype: torch.dtype, sum_dtype: torch.dtype | None) -> int:
    """Bytes of the window that each rank needs."""
    most = max(counts)
    return aligned(most * dtype.itemsize) + (most * sum_dtype.itemsize if sum_dtype is not None else 0)
