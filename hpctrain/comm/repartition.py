"""From one partition of a tensor over the ranks of an axis to any other: each rank is sent what it lacks, once."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch

from hpctrain.comm.buffers import accumulation_dtype
from hpctrain.comm.collectives import all_to_all
from hpctrain.comm.out_of_place import shared_memory_for
from hpctrain.comm.timing import timed_method
from hpctrain.comm.windows import add_up
from hpctrain.grid import Axis, Grid
from hpctrain.grid_shape import parts_of
from hpctrain.layout import Layout, Slices, common, index_of, steps, volume

# By the rank that they go to or come from: where they are in this rank's block, and where in that one's.
Pieces = dict[int, tuple[Slices, Slices]]


class Repartition:
    """A plan of intersections: of its target a rank keeps what it has, and is sent the rest by those that have it.

    All-gather, all-to-all, reduce-scatter and taking a slice are cases of it. Where several ranks have the same part,
    the first of them serves the first of those that have equal parts themselves, and so on in turn. Slices may be
    empty, and equal or not. On one node a rank writes its block once, and the others read what they lack in place.

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

        self._blocks, self._wanted = (list(map(_shape, parts)) for parts in (source, target))
        self._moves = self._adds or any(volume(common(had, part)) < volume(part) for had, part in zip(source, target))
        self._gives: Pieces = {}
        mine = owners[numbers[here], _ends(source[here])]
        for rank, part in enumerate(target):
            piece = common(source[here], part)
            if volume(piece) and giver(mine, rank) == here:
                self._gives[rank] = _within(piece, source[here]), _within(piece, part)
        self._takes: Pieces = {}
        for same in owners.values():
            piece = common(source[same[0]], target[here])
            if volume(piece):
                self._takes[giver(same, here)] = _within(piece, target[here]), _within(piece, source[same[0]])
        self._takes = dict(sorted(self._takes.items()))

    @timed_method
    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of the target."""
        if x.shape != self._blocks[self.axis.rank]:
            raise ValueError(
                f"rank {self.axis.rank} of {self.axis.name} has a block of {tuple(x.shape)}, but its layout says "
                f"{tuple(self._blocks[self.axis.rank])}"
            )
        return self._move(x, self._gives, self._takes, self._blocks, self._wanted, self._adds)

    @timed_method
    def adjoint(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of this rank's part of the source: the sum over all ranks that it was sent to."""
        return self._move(grad, self._takes, self._gives, self._wanted, self._blocks, add=True)

    def _move(self, x, gives, takes, blocks, wanted, add):
        here, shape = self.axis.rank, wanted[self.axis.rank]
        if not self._moves and x.shape == shape:
            return x.view_as(x)
        came = self._come(x, gives, takes, blocks) if self._moves else {}
        if here in takes:
            came[here] = x[gives[here][0]]
        parts = [(takes[rank][0], came[rank]) for rank in sorted(takes)]
        if parts and all(part.shape == shape for _, part in parts):
            out = x.new_empty(shape)
            return add_up([part for _, part in parts], out) if len(parts) > 1 else out.copy_(parts[0][1])
        out = (x.new_zeros if add else x.new_empty)(shape, dtype=accumulation_dtype(x.dtype) if add else x.dtype)
        for place, part in parts:
            out[place].add_(part) if add else out[place].copy_(part)
        return out.to(x.dtype)

    def _come(self, x, gives, takes, blocks):
        """What the others have for this rank, by rank."""
        axis, size, here = self.axis, self.axis.size, self.axis.rank
        counts = [[0] * size, [0] * size]
        for sizes, pieces in zip(counts, (gives, takes)):
            for rank, (place, _) in pieces.items():
                sizes[rank] = volume(place) if rank != here else 0
        leaving = [place for rank, (place, _) in sorted(gives.items()) if rank != here]
        memory = shared_memory_for(x, axis, sum(map(math.prod, blocks)))
        if memory is not None:
            places = {_ends(place): place for place in leaving}.values()  # to several ranks the same
            found = memory.read_blocks(x, places, blocks, *map(sum, counts))
            return {rank: found[rank][there] for rank, (_, there) in takes.items() if rank != here}
        packed = torch.cat([x[place].reshape(-1) for place in leaving]) if leaving else x.new_empty(0)
        arrived = all_to_all(packed, axis, *counts).split(counts[1])
        return {rank: arrived[rank].view(_shape(place)) for rank, (place, _) in takes.items() if rank != here}


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
