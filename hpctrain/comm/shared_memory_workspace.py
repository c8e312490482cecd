"""The methods of a workspace in shared memory; see `workspace.LocalWorkspace` for what each does."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import torch

from hpctrain.comm.buffers import REDUCED_HERE, Work
from hpctrain.comm.rotation import SharedMemoryRotation, shared_nbytes
from hpctrain.comm.slices import Slices, length, rows_of, sliced_shape, summed
from hpctrain.comm.timing import timed_method
from hpctrain.comm.windows import Window, add_up
from hpctrain.comm.windows_in_turn import WindowsInTurn
from hpctrain.grid import Axis
from hpctrain.shard import split

CHUNK = 1 << 16  # elements summed at a time, so that a sum is still in the cache when it is written to all
_NUMBER = 8  # bytes of a number of rows, or of a number beside a row
_ALIGNED = 64  # bytes that tensors behind one another begin at multiples of


class SharedMemoryWorkspace:
    """That of an axis on one node, for tensors in host memory.

    A gathered tensor is written once, in place, and read there by all; a partial product is written where the others
    will read it. What a call returns is valid until the next call other than `buffer` of the same workspace.

    A sum that is started must be waited for before the next call of the same workspace.
    """

    def __init__(self, axis: Axis, windows: int = 2):
        self.axis = axis
        self._windows = WindowsInTurn(axis, windows)
        self._filled: torch.Tensor | None = None  # by `read_buffer`, until it is read

    def free(self) -> None:
        """Give back the memory; the next call makes new. Collective."""
        self._windows.free()

    @timed_method
    def gather(self, part: torch.Tensor, counts: tuple[int, ...]) -> torch.Tensor:
        axis, (whole,) = self.axis, self._placed([part], counts)
        self._windows.last.barrier()
        moved = (axis.size - 1) * part.nbytes, whole.nbytes - part.nbytes
        axis.transport.traffic.add(axis.name, "all_gather", *moved)
        return whole

    @timed_method
    def gather_counted(self, part: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
        """In one step: the number of rows stands before them. Where a rank's do not fit, all see that, and take a
        larger window for one more."""
        axis, row = self.axis, math.prod(part.shape[1:]) * part.itemsize
        window = self._windows.next(_NUMBER)
        while True:
            window.parts[axis.rank][:_NUMBER].view(torch.int64).fill_(len(part))
            if _NUMBER + part.nbytes <= len(window.parts[0]):
                _rows_behind_number(window.parts[axis.rank], len(part), part).copy_(part)
            window.barrier()
            counts = tuple(int(memory[:_NUMBER].view(torch.int64)) for memory in window.parts)
            needed = _NUMBER + max(counts) * row
            if needed <= len(window.parts[0]):
                break
            window = self._windows.grown(needed)
        whole = torch.cat([_rows_behind_number(memory, count, part) for memory, count in zip(window.parts, counts)])
        others = axis.size - 1
        received = others * _NUMBER + whole.nbytes - part.nbytes
        axis.transport.traffic.add(axis.name, "all_gather", others * (_NUMBER + part.nbytes), received)
        return whole, counts

    @timed_method
    def read_start(
        self, parts: list[torch.Tensor], counts: tuple[int, ...], sent: int, received: int
    ) -> Work[list[torch.Tensor]]:
        """Begin to gather several tensors of as many rows each. Of the others' bytes this rank needs `received`,
        wherever they are, and they `sent` of its own, counted for each of them: in shared memory that is what moves.
        To be waited for before the next call of the same workspace."""
        wholes = self._placed(parts, counts)
        self.axis.transport.traffic.add(self.axis.name, "all_to_all", sent, received)
        return self._windows.last.barrier_start(lambda: wholes)

    @timed_method
    def read_blocks(
        self,
        block: torch.Tensor,
        leaving: Iterable[tuple[slice, ...]],
        shapes: list[torch.Size],
        sent: int,
        received: int,
    ) -> list[torch.Tensor]:
        """Every rank's block, rank r's of shapes[r], where it has written what is `leaving` of it: this rank needs so
        many of the others' elements, and they of its own."""
        size, counts = block.itemsize, list(map(math.prod, shapes))
        memory = self._windows.next(max(counts) * size).parts
        blocks = [m[: n * size].view(block.dtype).view(shape) for m, n, shape in zip(memory, counts, shapes)]
        for place in leaving:
            blocks[self.axis.rank][place] = block[place]
        self._windows.last.barrier()
        self.axis.transport.traffic.add(self.axis.name, "all_to_all", sent * size, received * size)
        return blocks

    def read_buffer(self, like: torch.Tensor, counts: tuple[int, ...], width: int) -> torch.Tensor:
        """(rows, width) to be filled, and to be given to the next call, `read_start`, as its first tensor: not copied
        there. Behind it one number a row may follow."""
        row = width * like.itemsize + _NUMBER
        self._windows.next(-(-(sum(counts) * row + _ALIGNED) // self.axis.size))
        whole = self._windows.last.whole[: sum(counts) * width * like.itemsize].view(like.dtype).view(-1, width)
        self._filled = whole[rows_of(counts)[self.axis.rank]]
        return self._filled

    def _placed(self, parts: list[torch.Tensor], counts: tuple[int, ...]) -> list[torch.Tensor]:
        """All ranks' rows of each, in the next window, this rank's being there."""
        total, own = sum(counts), rows_of(counts)[self.axis.rank]
        sizes = [total * math.prod(part.shape[1:]) * part.itemsize for part in parts]
        starts = list(itertools.accumulate((-(-size // _ALIGNED) * _ALIGNED for size in sizes), initial=0))
        filled, self._filled = self._filled, None
        if filled is not parts[0]:
            self._windows.next(-(-starts[-1] // self.axis.size))
        wholes = []
        for part, start, size in zip(parts, starts, sizes):
            whole = self._windows.last.whole[start : start + size].view(part.dtype).view(total, *part.shape[1:])
            if part is not filled:
                whole[own].copy_(part)
            wholes.append(whole)
        return wholes

    def buffer(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        return self._windows.next(numel * like.itemsize).parts[self.axis.rank].view(like.dtype)[:numel]

    def reserve(self, numel: int, like: torch.Tensor) -> None:
        for _ in range(len(self._windows)):
            self.buffer(numel, like)

    @timed_method
    def reduce(self, buffer: torch.Tensor, counts: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        window = self._windows.last
        window.barrier()
        return self._own_slice(window, buffer, counts, dtype)

    @timed_method
    def reduce_start(
        self, buffer: torch.Tensor, counts: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> Work[torch.Tensor]:
        window = self._windows.last
        return window.barrier_start(lambda: self._own_slice(window, buffer, counts, dtype))

    def _own_slice(
        self, window: Window, buffer: torch.Tensor, counts: tuple[int, ...], dtype: torch.dtype | None
    ) -> torch.Tensor:
        axis = self.axis
        first, local = sum(counts[: axis.rank]), counts[axis.rank]
        out = buffer.new_empty(local, dtype=dtype or buffer.dtype)
        size = buffer.itemsize
        parts = [part[first * size : (first + local) * size].view(buffer.dtype) for part in window.parts]
        if axis.size == 2 and buffer.dtype not in REDUCED_HERE:
            torch.add(*parts, out=out)
        else:
            for start in range(0, local, CHUNK):
                add_up([part[start : start + CHUNK] for part in parts], out[start : start + CHUNK])
        moved = (buffer.numel() - local) * size, (axis.size - 1) * local * size
        axis.transport.traffic.add(axis.name, "reduce_scatter", *moved)
        return out

    def add_up(self, buffer: torch.Tensor) -> torch.Tensor:
        """Each rank adds up a part, in the window of the last call."""
        axis = self.axis
        buffers = [part[: buffer.nbytes].view(buffer.dtype) for part in self._windows.last.parts]
        part = split(buffer.numel(), axis.size, axis.rank)
        self.barrier()
        for start in range(part.start, part.stop, CHUNK):
            places = [each[start : min(start + CHUNK, part.stop)] for each in buffers]
            add_up(places, places[0])
        self.barrier()
        return buffers[0]

    def total(self, buffer: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the sum of all ranks' buffers to `out`. Not in the ledger."""
        if self.axis.size == 2:  # each adds up all: no second barrier
            self.barrier()
            add_up([part[: buffer.nbytes].view(buffer.dtype) for part in self._windows.last.parts], out)
        else:
            out.copy_(self.add_up(buffer))

    def barrier(self) -> None:
        self._windows.last.barrier()

    # The same for matrices of which each rank holds columns, and between the two.

    @timed_method
    def gather_columns(self, part: torch.Tensor, widths: tuple[int, ...]) -> torch.Tensor:
        axis = self.axis
        rows, local = len(part), widths[axis.rank]
        whole = self._matrix(rows, sum(widths), part)
        whole.narrow(1, sum(widths[: axis.rank]), local).copy_(part)
        self._windows.last.barrier()
        moved = (axis.size - 1) * part.nbytes, whole.nbytes - part.nbytes
        axis.transport.traffic.add(axis.name, "all_gather", *moved)
        return whole

    @timed_method
    def reduce_columns(self, buffer: torch.Tensor, widths: tuple[int, ...]) -> torch.Tensor:
        axis = self.axis
        rows, local = len(buffer), widths[axis.rank]
        window = self._windows.last
        window.barrier()
        whole = [part[: buffer.nbytes].view(buffer.dtype).view(buffer.shape) for part in window.parts]
        parts = [matrix.narrow(1, sum(widths[: axis.rank]), local) for matrix in whole]
        out = buffer.new_empty(rows, local)
        step = max(1, CHUNK // max(1, local))
        for start in range(0, rows, step):
            add_up([part[start : start + step] for part in parts], out[start : start + step])
        moved = buffer.nbytes - out.nbytes, (axis.size - 1) * out.nbytes
        axis.transport.traffic.add(axis.name, "reduce_scatter", *moved)
        return out

    @timed_method
    def rows_to_columns(self, part: torch.Tensor, counts: tuple[int, ...], widths: tuple[int, ...]) -> torch.Tensor:
        axis = self.axis
        rows, local = sum(counts), widths[axis.rank]
        whole = self._matrix(rows, sum(widths), part)
        whole.narrow(0, sum(counts[: axis.rank]), len(part)).copy_(part)
        self._windows.last.barrier()
        kept = len(part) * local
        moved = (part.numel() - kept) * part.itemsize, (rows * local - kept) * part.itemsize
        axis.transport.traffic.add(axis.name, "all_to_all", *moved)
        return whole.narrow(1, sum(widths[: axis.rank]), local)

    @timed_method
    def columns_to_rows(self, part: torch.Tensor, counts: tuple[int, ...], widths: tuple[int, ...]) -> torch.Tensor:
        axis = self.axis
        local, width = counts[axis.rank], widths[axis.rank]
        whole = self._matrix(len(part), sum(widths), part)
        whole.narrow(1, sum(widths[: axis.rank]), width).copy_(part)
        self._windows.last.barrier()
        kept = local * width
        moved = (part.numel() - kept) * part.itemsize, (local * sum(widths) - kept) * part.itemsize
        axis.transport.traffic.add(axis.name, "all_to_all", *moved)
        return whole.narrow(0, sum(counts[: axis.rank]), local)

    @timed_method
    def rows_to_slices(self, parts: list[torch.Tensor], counts: tuple[int, ...], slices: Slices) -> list[torch.Tensor]:
        axis, rows = self.axis, sum(counts)
        shapes = [sliced_shape(part, part.shape[1], rows) for part in parts]
        flat = self._windows.next_whole(sum(map(math.prod, shapes)), parts[0].dtype)
        whole = [t.view(shape) for t, shape in zip(flat.split(list(map(math.prod, shapes))), shapes)]
        sent, received = self._swapped_bytes(parts, counts, slices)
        axis.transport.traffic.add(axis.name, "all_to_all", sent, received)
        for place in whole:
            place[:, :, rows_of(counts)[axis.rank]] = parts.pop(0)
        self._windows.last.patient_barrier()
        found = [place[:, of[axis.rank]].clone() for place, of in zip(whole, slices)]
        self._windows.last.release()
        return found

    @timed_method
    def slices_to_rows(self, parts: list[torch.Tensor], counts: tuple[int, ...], slices: Slices) -> list[torch.Tensor]:
        axis, rows = self.axis, sum(counts)
        shapes = [[sliced_shape(p, length(of[r]), rows) for p, of in zip(parts, slices)] for r in range(axis.size)]
        sizes = [list(map(math.prod, of_rank)) for of_rank in shapes]
        dtype = parts[0].dtype
        memory = self._windows.next(max(map(sum, sizes)) * dtype.itemsize).parts
        flat = [m[: sum(n) * dtype.itemsize].view(dtype).split(n) for m, n in zip(memory, sizes)]
        whole = [[t.view(shape) for t, shape in zip(*of_rank)] for of_rank in zip(flat, shapes)]
        received, sent = self._swapped_bytes(parts, counts, slices)
        axis.transport.traffic.add(axis.name, "all_to_all", sent, received)
        for place in whole[axis.rank]:
            place.copy_(parts.pop(0))
        self._windows.last.patient_barrier()
        local = rows_of(counts)[axis.rank]
        found = [summed([of_rank[t][:, :, local] for of_rank in whole], of) for t, of in enumerate(slices)]
        self._windows.last.release()
        return found

    def _swapped_bytes(self, parts: list[torch.Tensor], counts: tuple[int, ...], slices: Slices) -> tuple[int, int]:
        """Bytes that leave this rank's rows for others' slices, and this rank's slices for others' rows."""
        axis = self.axis
        rows, local = sum(counts), counts[axis.rank]
        row = [part.shape[0] * part.shape[3] * part.itemsize for part in parts]
        mine, all_of = [length(of[axis.rank]) for of in slices], [sum(map(length, of)) for of in slices]
        leaving_rows = sum(size * local * (n - m) for size, n, m in zip(row, all_of, mine))
        leaving_slices = sum(size * (rows - local) * m for size, m in zip(row, mine))
        return leaving_rows, leaving_slices

    @timed_method
    def rotate(
        self, part: torch.Tensor, counts: tuple[int, ...], sum_dtype: torch.dtype | None = None, gather: bool = False
    ) -> SharedMemoryRotation:
        window = self._windows.next(shared_nbytes(counts, part.dtype, sum_dtype))
        return SharedMemoryRotation(window, part, self.axis, counts, sum_dtype)

    def _matrix(self, rows: int, columns: int, like: torch.Tensor) -> torch.Tensor:
        """The next window's memory, one matrix for all ranks."""
        return self._windows.next_whole(rows * columns, like.dtype).view(rows, columns)


def _rows_behind_number(memory: torch.Tensor, count: int, like: torch.Tensor) -> torch.Tensor:
    shape = count, *like.shape[1:]
    end = _NUMBER + math.prod(shape) * like.itemsize
    return memory[_NUMBER:end].view(like.dtype).view(shape)
