"""The methods of a workspace by messages; see `workspace.LocalWorkspace` for what each does."""

from __future__ import annotations

import math

import torch

from hpctrain.comm.buffers import Work
from hpctrain.comm.collectives import (
    all_gather,
    all_to_all,
    reduce_scatter,
    reduce_scatter_start,
)
from hpctrain.comm.rotation import GatherRotation, HopRotation
from hpctrain.comm.slices import Slices, length, rows_of, sliced_shape, summed
from hpctrain.comm.timing import timed_method
from hpctrain.grid import Axis


class MessageWorkspace:
    """That of an axis over several nodes, or of tensors on a device. What a call returns is memory of its own.

    Columns are packed, rank by rank, before they are sent, and put in their place when they have come.
    """

    def __init__(self, axis: Axis):
        self.axis = axis

    @timed_method
    def gather(self, part: torch.Tensor, counts: tuple[int, ...]) -> torch.Tensor:
        return all_gather(part, self.axis, counts)

    @timed_method
    def gather_counted(self, part: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
        counts = tuple(all_gather(torch.tensor([len(part)]), self.axis).tolist())
        return all_gather(part, self.axis, counts), counts

    def buffer(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        return like.new_empty(numel)

    def reserve(self, numel: int, like: torch.Tensor) -> None:
        pass

    @timed_method
    def reduce(self, buffer: torch.Tensor, counts: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        return reduce_scatter(buffer, self.axis, counts, dtype)

    @timed_method
    def reduce_start(
        self, buffer: torch.Tensor, counts: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> Work[torch.Tensor]:
        return reduce_scatter_start(buffer, self.axis, counts, dtype)

    @timed_method
    def reduce_columns(self, buffer: torch.Tensor, widths: tuple[int, ...]) -> torch.Tensor:
        rows, local = len(buffer), widths[self.axis.rank]
        return reduce_scatter(_packed(buffer, widths), self.axis, [rows * width for width in widths]).view(rows, local)

    @timed_method
    def gather_columns(self, part: torch.Tensor, widths: tuple[int, ...]) -> torch.Tensor:
        rows = len(part)
        sizes = [rows * width for width in widths]
        return _unpacked(all_gather(part.reshape(-1), self.axis, sizes), rows, widths)

    @timed_method
    def rows_to_columns(self, part: torch.Tensor, counts: tuple[int, ...], widths: tuple[int, ...]) -> torch.Tensor:
        local = widths[self.axis.rank]
        sends, receives = [len(part) * width for width in widths], [count * local for count in counts]
        return all_to_all(_packed(part, widths), self.axis, sends, receives).view(sum(counts), local)

    @timed_method
    def columns_to_rows(self, part: torch.Tensor, counts: tuple[int, ...], widths: tuple[int, ...]) -> torch.Tensor:
        local, width = counts[self.axis.rank], widths[self.axis.rank]
        sends, receives = [count * width for count in counts], [local * w for w in widths]
        return _unpacked(all_to_all(part.reshape(-1), self.axis, sends, receives), local, widths)

    @timed_method
    def rows_to_slices(self, parts: list[torch.Tensor], counts: tuple[int, ...], slices: Slices) -> list[torch.Tensor]:
        rank, ranks = self.axis.rank, range(self.axis.size)
        leaving = [[part[:, of[r]] for part, of in zip(parts, slices)] for r in ranks]
        shapes = [[sliced_shape(p, length(of[rank]), counts[r]) for p, of in zip(parts, slices)] for r in ranks]
        parts.clear()
        arrived = self._swap(leaving, shapes)
        return [torch.cat([arrived[r][t] for r in ranks], 2) for t in range(len(slices))]

    @timed_method
    def slices_to_rows(self, parts: list[torch.Tensor], counts: tuple[int, ...], slices: Slices) -> list[torch.Tensor]:
        rank, ranks = self.axis.rank, range(self.axis.size)
        leaving = [[part[:, :, rows] for part in parts] for rows in rows_of(counts)]
        shapes = [[sliced_shape(p, length(of[r]), counts[rank]) for p, of in zip(parts, slices)] for r in ranks]
        parts.clear()
        arrived = self._swap(leaving, shapes)
        return [summed([arrived[r][t] for r in ranks], of) for t, of in enumerate(slices)]

    def _swap(self, leaving: list[list[torch.Tensor]], shapes: list[list[tuple[int, ...]]]) -> list[list[torch.Tensor]]:
        """Tensors leaving[r], which is empty after it, go to rank r, those of shapes[r] come from there."""
        sizes = [[math.prod(shape) for shape in of_rank] for of_rank in shapes]
        flat = torch.cat([part.reshape(-1) for to_rank in leaving for part in to_rank])
        sends = [sum(part.numel() for part in to_rank) for to_rank in leaving]
        leaving.clear()
        arrived = all_to_all(flat, self.axis, sends, list(map(sum, sizes)))
        pieces = iter(arrived.split([size for of_rank in sizes for size in of_rank]))
        return [[next(pieces).view(shape) for shape in of_rank] for of_rank in shapes]

    @timed_method
    def rotate(
        self, part: torch.Tensor, counts: tuple[int, ...], sum_dtype: torch.dtype | None = None, gather: bool = False
    ) -> HopRotation | GatherRotation:
        return (GatherRotation if gather else HopRotation)(part, self.axis, counts, sum_dtype)


def _packed(matrix: torch.Tensor, widths: tuple[int, ...]) -> torch.Tensor:
    """Blocks of columns, one after another."""
    return torch.cat([block.reshape(-1) for block in matrix.split(widths, 1)])


def _unpacked(flat: torch.Tensor, rows: int, widths: tuple[int, ...]) -> torch.Tensor:
    blocks = flat.split([rows * width for width in widths])
    return torch.cat([block.view(rows, width) for block, width in zip(blocks, widths)], 1)
