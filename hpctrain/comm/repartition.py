"""From one partition of a tensor over the ranks of an axis to any other: each rank is sent what it lacks, once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from hpctrain.comm.buffers import accumulation_dtype
from hpctrain.comm.collectives import all_to_all
from hpctrain.comm.timing import timed_method
from hpctrain.grid import Axis, Grid
from hpctrain.grid_shape import parts_of
from hpctrain.layout import Layout, Slices, common, index_of, steps, volume

Pieces = dict[int, Slices]  # of this rank's block, by the rank that they go to or come from


class Repartition:
    """A plan of intersections: of its target a rank keeps what it has, and is sent the rest by those that have it.

    All-gather, all-to-all, reduce-scatter and taking a slice are cases of it. Where several ranks have the same part,
    the first of them serves the first of those that have equal parts themselves, and so on in turn. Slices may be
    empty, and equal or not.

    Args:
        axis: whose ranks take part; collective over it.
        source, target: the slices of the whole tensor that each rank has, and is to have.
        summands: which summand of the tensor each rank has a part of; they are added in the order of the ranks.
    """

    def __init__(
        self, axis: Axis, source: Sequence[Slices], target: Sequence[Slices], summands: Sequence[int] | None = None
    ):
        self.axis, here = axis, axis.rank
        numbers = summands or (0,) * axis.size
        self._adds = len({*numbers}) > 1
        owners: defaultdict[tuple[int, tuple], list[int]] = defaultdict(list)
        turn = []  # of each rank, among those that have what it has
        for rank, (number, part) in enumerate(zip(numbers, source)):
            same = owners[number, _ends(part)]
            turn.append(len(same))
            same.append(rank)

        def giver(owners, rank):
            return rank if rank in owners else owners[turn[rank] % len(owners)]

        self._block, self._wanted = _shape(source[here]), _shape(target[here])
        self._gives: Pieces = {}
        mine = owners[numbers[here], _ends(source[here])]
        for rank, part in enumerate(target):
            piece = common(source[here], part)
            if volume(piece) and giver(mine, rank) == here:
                self._gives[rank] = _within(piece, source[here])
        self._takes: Pieces = {}
        for same in owners.values():
            piece = common(source[same[0]], target[here])
            if volume(piece):
                self._takes[giver(same, here)] = _within(piece, target[here])
        self._takes = dict(sorted(self._takes.items()))

    @timed_method
    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of the target."""
        if x.shape != self._block:
            raise ValueError(
                f"rank {self.axis.rank} of {self.axis.name} has a block of {tuple(x.shape)}, but its layout says "
                f"{tuple(self._block)}"
            )
        return self._move(x, self._gives, self._takes, self._wanted, self._adds)

    @timed_method
    def adjoint(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of this rank's part of the source: the sum over all ranks that it was sent to."""
        return self._move(grad, self._takes, self._gives, self._block, add=True)

    def _move(self, x, gives, takes, shape, add):
        here, size = self.axis.rank, self.axis.size
        if gives == takes and list(gives) == [here] and x.shape == shape:
            return x.view_as(x)
        out = (x.new_zeros if add else x.new_empty)(shape, dtype=accumulation_dtype(x.dtype) if add else x.dtype)
        counts = [[0] * size, [0] * size]
        for sizes, pieces in zip(counts, (gives, takes)):
            for rank, piece in pieces.items():
                sizes[rank] = volume(piece) if rank != here else 0
        leaving = [x[piece].reshape(-1) for rank, piece in sorted(gives.items()) if rank != here]
        arrived = all_to_all(torch.cat(leaving) if leaving else x.new_empty(0), self.axis, *counts).split(counts[1])
        for rank, piece in sorted(takes.items()):
            part = out[piece]
            came = x[gives[here]] if rank == here else arrived[rank].view(part.shape)
            part.add_(came) if add else part.copy_(came)
        return out.to(x.dtype)


def repartitions(grid: Grid, source: Layout, target: Layout) -> list[Repartition]:
    """Those that take one layout on a grid to the other.

    They are made once for each grid and pair of layouts.

    Raises:
        ValueError: for layouts of different shapes, and a target of summands.
    """
    known = grid.transport.repartitions
    if (source, target) not in known:
        if source.shape != target.shape or target.partial:
            raise ValueError(
                f"reshard keeps the shape and gives whole numbers, got {source.shape} to {target.shape}"
                + f", the target partial over {', '.join(target.partial)}" * bool(target.partial)
            )
        known[source, target] = [_repartition(grid, *step) for step in steps(source, target, grid.sizes)]
    return known[source, target]


def _repartition(grid, source, target):
    """Over the ranks among which something may move: those along the axes that cut the source, but for outer cuts that
    the target has as well."""
    sizes = grid.sizes
    crossed = {*source.partial}
    for before, after in zip(source.cuts, target.cuts):
        alike = 0
        while alike < min(len(before), len(after)) and before[alike] == after[alike]:
            alike += 1
        crossed |= {part for cut in before[alike:] for part in parts_of(cut.axis)}
    axis = grid.spanning([name for name in crossed if sizes[name] > 1])
    places = [grid.place_of(rank) for rank in grid.members(axis.name)]
    summands = [index_of("+".join(source.partial), sizes, place) if source.partial else 0 for place in places]
    before, after = ([layout.slices(sizes, place) for place in places] for layout in (source, target))
    return Repartition(axis, before, after, summands)


def _ends(part: Slices) -> tuple:
    return tuple((each.start, each.stop) for each in part)


def _shape(part: Slices) -> torch.Size:
    return torch.Size(each.stop - each.start for each in part)


def _within(piece: Slices, block: Slices) -> Slices:
    return tuple(slice(p.start - b.start, p.stop - b.start) for p, b in zip(piece, block))
