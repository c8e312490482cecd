"""Scratch memory for collectives along an axis, through shared memory where all of its ranks are on one node."""

from __future__ import annotations

import math
import mmap

import torch

from hpctrain.comm.buffers import REDUCED_HERE, Work
from hpctrain.comm.collectives import (
    all_gather,
    all_gather_start,
    all_to_all,
    reduce_scatter,
    reduce_scatter_start,
)
from hpctrain.comm.timing import timed_method
from hpctrain.comm.windows import Window, add_up
from hpctrain.shard import split

CHUNK = 1 << 16  # elements summed at a time, so that a sum is still in the cache when it is written to all


class Workspace:
    """All-gather and reduce-scatter along an axis for passing use, through shared memory where the axis is on one node.

    A gathered tensor is written once, in place, and read there by all; a partial product is written where the others
    will read it. There are two windows in turn. What a call returns is valid until the next call other than `room` on
    the same axis: the barrier in there says that everybody is done with the older window, which the call after takes.

    A call that is started must be waited for before the next one of the same workspace. While its barrier is under way
    the older window is still in use by what it was started beside, so that such gathers take three windows in turn:
    once the barrier of call n is waited for, everybody has begun call n and is done with call n-2, whose window call
    n+1 takes. Sums are copied out before the next call, so that two will do.
    """

    def __init__(self, axis, windows: int = 2):
        self.axis = axis
        self._windows: list[Window | None] = [None] * windows
        self._turn = 0

    @timed_method
    def gather(self, part: torch.Tensor, counts: tuple[int, ...]) -> torch.Tensor:
        """All ranks' rows, in rank order; rank r has counts[r]."""
        axis = self.axis
        if axis.size == 1:
            return part
        if not (axis.one_node and part.is_cpu):
            return all_gather(part, axis, counts)
        whole = self._place(part, counts)
        self._windows[self._turn].barrier()
        return whole

    @timed_method
    def gather_start(self, part: torch.Tensor, counts: tuple[int, ...]) -> Work:
        """Begin `gather`. What `wait()` returns is valid until the next call but one is started."""
        if self.axis.size == 1 or not (self.axis.one_node and part.is_cpu):
            return all_gather_start(part, self.axis, counts)
        whole = self._place(part, counts)
        return self._windows[self._turn].barrier_start(lambda: whole)

    def _place(self, part, counts):
        """The next window as the tensor of all ranks' rows, into which this rank has written its own."""
        axis, rows, row = self.axis, sum(counts), math.prod(part.shape[1:])
        first, held = sum(counts[: axis.rank]), counts[axis.rank]
        whole = self._whole(rows * row, part.dtype)
        whole[first * row : (first + held) * row].view(part.shape).copy_(part)
        item = row * part.itemsize
        axis.wire.traffic.add(axis.name, "all_gather", (axis.size - 1) * held * item, (rows - held) * item)
        return whole.view(rows, *part.shape[1:])

    def room(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        """A flat tensor to fill with this rank's summands, for `reduce`."""
        if self.axis.size == 1 or not (self.axis.one_node and like.is_cpu):
            return like.new_empty(numel)
        return self._next(numel * like.itemsize).parts[self.axis.rank].view(like.dtype)[:numel]

    @timed_method
    def reduce(self, room: torch.Tensor, counts: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        """This rank's counts[rank] elements of the sum of all ranks' rooms, in `dtype`, by default theirs."""
        axis = self.axis
        if axis.size == 1 or not (axis.one_node and room.is_cpu):
            return reduce_scatter(room, axis, counts, dtype)
        window = self._windows[self._turn]
        window.barrier()
        return self._own_slice(window, room, counts, dtype)

    @timed_method
    def reduce_start(self, room: torch.Tensor, counts: tuple[int, ...], dtype: torch.dtype | None = None) -> Work:
        """Begin `reduce`."""
        if self.axis.size == 1 or not (self.axis.one_node and room.is_cpu):
            return reduce_scatter_start(room, self.axis, counts, dtype)
        window = self._windows[self._turn]
        return window.barrier_start(lambda: self._own_slice(window, room, counts, dtype))

    def _own_slice(self, window, room, counts, dtype=None):
        axis = self.axis
        first, held = sum(counts[: axis.rank]), counts[axis.rank]
        out = room.new_empty(held, dtype=dtype or room.dtype)
        size = room.itemsize
        parts = [part[first * size : (first + held) * size].view(room.dtype) for part in window.parts]
        if axis.size == 2 and room.dtype not in REDUCED_HERE:
            torch.add(*parts, out=out)
        else:
            for start in range(0, held, CHUNK):
                add_up([part[start : start + CHUNK] for part in parts], out[start : start + CHUNK])
        moved = (room.numel() - held) * size, (axis.size - 1) * held * size
        axis.wire.traffic.add(axis.name, "reduce_scatter", *moved)
        return out

    def add_up(self, room: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' rooms, in memory that all of them share; each adds up a part. Not in the ledger."""
        axis = self.axis
        if axis.size == 1:
            return room
        rooms = [part[: room.nbytes].view(room.dtype) for part in self._windows[self._turn].parts]
        part = split(room.numel(), axis.size, axis.rank)
        self.barrier()
        for start in range(part.start, part.stop, CHUNK):
            places = [each[start : min(start + CHUNK, part.stop)] for each in rooms]
            add_up(places, places[0])
        self.barrier()
        return rooms[0]

    def barrier(self) -> None:
        """What any rank wrote in the window of the last call, every rank sees after."""
        if self.axis.size > 1:
            self._windows[self._turn].barrier()

    # The same for matrices of which each rank holds columns, and between the two.

    @timed_method
    def gather_columns(self, part: torch.Tensor, widths: tuple[int, ...]) -> torch.Tensor:
        """All ranks' columns, in rank order; rank r has widths[r]."""
        axis = self.axis
        if axis.size == 1:
            return part
        rows, held = len(part), widths[axis.rank]
        if not (axis.one_node and part.is_cpu):
            sizes = [rows * width for width in widths]
            flat = all_gather(part.reshape(-1), axis, sizes)
            return torch.cat([block.view(rows, width) for block, width in zip(flat.split(sizes), widths)], 1)
        whole = self._matrix(rows, sum(widths), part)
        whole.narrow(1, sum(widths[: axis.rank]), held).copy_(part)
        self._windows[self._turn].barrier()
        moved = (axis.size - 1) * part.nbytes, whole.nbytes - part.nbytes
        axis.wire.traffic.add(axis.name, "all_gather", *moved)
        return whole

    def reduce_rows(self, room: torch.Tensor, counts: tuple[int, ...]) -> torch.Tensor:
        """This rank's counts[rank] rows of the sum of all ranks' rooms, viewed as matrices."""
        width = room.shape[1]
        flat = self.reduce(room.view(-1), [count * width for count in counts])
        return flat.view(counts[self.axis.rank], width)

    @timed_method
    def reduce_columns(self, room: torch.Tensor, widths: tuple[int, ...]) -> torch.Tensor:
        """This rank's widths[rank] columns of the sum of all ranks' rooms, viewed as matrices."""
        axis = self.axis
        if axis.size == 1:
            return room
        rows, held = len(room), widths[axis.rank]
        if not (axis.one_node and room.is_cpu):
            packed = torch.cat([block.reshape(-1) for block in room.split(widths, 1)])
            return reduce_scatter(packed, axis, [rows * width for width in widths]).view(rows, held)
        window = self._windows[self._turn]
        window.barrier()
        whole = [part[: room.nbytes].view(room.dtype).view(room.shape) for part in window.parts]
        parts = [matrix.narrow(1, sum(widths[: axis.rank]), held) for matrix in whole]
        out = room.new_empty(rows, held)
        step = max(1, CHUNK // max(1, held))
        for start in range(0, rows, step):
            add_up([part[start : start + step] for part in parts], out[start : start + step])
        moved = room.nbytes - out.nbytes, (axis.size - 1) * out.nbytes
        axis.wire.traffic.add(axis.name, "reduce_scatter", *moved)
        return out

    @timed_method
    def rows_to_columns(self, part: torch.Tensor, counts: tuple[int, ...], widths: tuple[int, ...]) -> torch.Tensor:
        """From counts[r] whole rows on each rank r to widths[r] whole columns, by an all-to-all."""
        axis = self.axis
        if axis.size == 1:
            return part
        rows, held = sum(counts), widths[axis.rank]
        if not (axis.one_node and part.is_cpu):
            packed = torch.cat([block.reshape(-1) for block in part.split(widths, 1)])
            sends, receives = [len(part) * width for width in widths], [count * held for count in counts]
            return all_to_all(packed, axis, sends, receives).view(rows, held)
        whole = self._matrix(rows, sum(widths), part)
        whole.narrow(0, sum(counts[: axis.rank]), len(part)).copy_(part)
        self._windows[self._turn].barrier()
        kept = len(part) * held
        moved = (part.numel() - kept) * part.itemsize, (rows * held - kept) * part.itemsize
        axis.wire.traffic.add(axis.name, "all_to_all", *moved)
        return whole.narrow(1, sum(widths[: axis.rank]), held)

    @timed_method
    def columns_to_rows(self, part: torch.Tensor, counts: tuple[int, ...], widths: tuple[int, ...]) -> torch.Tensor:
        """From widths[r] whole columns on each rank r to counts[r] whole rows. Adjoint and inverse of the above."""
        axis = self.axis
        if axis.size == 1:
            return part
        held, width = counts[axis.rank], widths[axis.rank]
        if not (axis.one_node and part.is_cpu):
            sizes = [held * w for w in widths]
            flat = all_to_all(part.reshape(-1), axis, [count * width for count in counts], sizes)
            return torch.cat([block.view(held, w) for block, w in zip(flat.split(sizes), widths)], 1)
        whole = self._matrix(len(part), sum(widths), part)
        whole.narrow(1, sum(widths[: axis.rank]), width).copy_(part)
        self._windows[self._turn].barrier()
        kept = held * width
        moved = (part.numel() - kept) * part.itemsize, (held * sum(widths) - kept) * part.itemsize
        axis.wire.traffic.add(axis.name, "all_to_all", *moved)
        return whole.narrow(0, sum(counts[: axis.rank]), held)

    def _matrix(self, rows: int, columns: int, like: torch.Tensor) -> torch.Tensor:
        """The next window's memory, one matrix for all ranks."""
        return self._whole(rows * columns, like.dtype).view(rows, columns)

    def _whole(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The next window's memory as one flat tensor for all ranks, of which each has reserved its share."""
        nbytes = numel * dtype.itemsize
        return self._next(-(-nbytes // self.axis.size)).whole[:nbytes].view(dtype)

    def _next(self, nbytes: int) -> Window:
        """The window whose turn it is, with as many bytes a rank: all ranks ask for the same size, so all agree.

        Where it must grow the older one is freed: everybody has done with what it held. It grows by a quarter at least,
        so that sizes that creep up make few windows.
        """
        self._turn = (self._turn + 1) % len(self._windows)
        window = self._windows[self._turn]
        if window is None or len(window.parts[0]) < nbytes:
            if window is not None:
                nbytes = max(nbytes, 5 * len(window.parts[0]) // 4)
                self._windows[self._turn] = None
                self.axis.wire.resources.remove(window)
                window.free()
            pages = -(-nbytes // mmap.PAGESIZE) or 1
            window = self._windows[self._turn] = Window(self.axis, pages * mmap.PAGESIZE)
        return window


def workspace(axis, use: str = "now") -> Workspace:
    """The axis's workspace for calls that return when they are done ("now"), or for those that are started: reductions
    ("later") and gathers ("ahead"). Each has windows of its own, so that one may be under way beside another."""
    if axis.workspace is None:
        axis.workspace = {"now": Workspace(axis), "later": Workspace(axis), "ahead": Workspace(axis, 3)}
    return axis.workspace[use]
