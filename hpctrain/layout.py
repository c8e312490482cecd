"""Which axes of a grid cut the dims of a tensor: rules from named dims to axes, and the slices, the shards and the
elements to move that follow from them.

Source: Shazeer et al., "Mesh-TensorFlow: deep learning for supercomputers" (2018): a tensor's dims have names, and a
rule says for a name over which axis of the mesh of processors dims of that name are cut. Here a dim may be cut over
several axes, one inside of the other, in parts that need not be equal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hpctrain.grid_shape import AXES, JOINED, TENSOR, parts_of
from hpctrain.shard import Shard, subsplit

Slices = tuple[slice, ...]


class Cut(NamedTuple):
    """A dim is cut over an axis, or several joined ("y+z", "data"), at multiples of `unit`; None is that of the dim."""

    axis: str
    unit: int | None = None


Axes = str | Cut | Sequence[str | Cut]  # outermost first


@dataclass(frozen=True)
class Layout:
    """What part of a tensor each rank has: every rank of axes that cut no dim, the same part as its neighbours.

        Layout.of((64, 32), {0: ("z", "x"), 1: "y"})    # rows over z, and each part over x; columns over y

    Attributes:
        shape: of the whole tensor.
        cuts: of each dim, outermost first.
        partial: axes along which ranks have summands of the tensor.
    """

    shape: tuple[int, ...]
    cuts: tuple[tuple[Cut, ...], ...]
    partial: tuple[str, ...] = ()

    @classmethod
    def of(cls, shape: Sequence[int], axes: Mapping[int, Axes], partial: str | Sequence[str] = ()) -> Layout:
        """
        Raises:
            ValueError: for dims and axes that are not there, an axis that is named twice, experts' axes beside those of
                which they are made, and units that do not divide a dim.

        >>> Layout.of((6, 4), {0: "x", 1: "x"})
        Traceback (most recent call last):
        ValueError: a layout names every axis once, got x, x
        """
        shape = tuple(shape)
        if wrong := [dim for dim in axes if dim not in range(len(shape))]:
            raise ValueError(f"a layout of shape {shape} has dims 0 to {len(shape) - 1}, got {wrong[0]}")
        cuts = tuple(
            tuple(Cut(each.axis, each.unit or 1) for each in as_cuts(axes.get(dim, ()))) for dim in range(len(shape))
        )
        names = (partial,) if isinstance(partial, str) else partial
        layout = cls(shape, cuts, tuple(part for name in names for part in parts_of(name)))
        _check(layout)
        return layout

    @property
    def axes(self) -> tuple[str, ...]:
        """Those that cut a dim, in the order of the dims."""
        return tuple(part for cuts in self.cuts for cut in cuts for part in parts_of(cut.axis))

    def slices(self, sizes: Mapping[str, int], place: Mapping[str, int]) -> Slices:
        """What the rank at `place` has, of a grid whose axes have these sizes.

        >>> Layout.of((5, 4), {0: ("z", "x")}).slices({"x": 2, "z": 2}, {"x": 0, "z": 1})
        (slice(3, 4, None), slice(0, 4, None))
        """
        found = []
        for length, cuts in zip(self.shape, self.cuts):
            part = slice(0, length)
            for axis, unit in cuts:
                part = subsplit(part, _size(axis, sizes), index_of(axis, sizes, place), unit or 1)
            found.append(part)
        return tuple(found)

    def shard(self, sizes: Mapping[str, int], place: Mapping[str, int], partial: bool = True) -> Shard:
        """The same of a parameter; see `Shard` for `partial`."""
        replicated = tuple(axis for axis in TENSOR if axis not in self.axes)
        if "expert" in self.axes and sizes["expert"] > 1:  # each of whose ranks has other tokens
            return Shard(self.shape, self.slices(sizes, place), alike="copies")
        return Shard(self.shape, self.slices(sizes, place), replicated, partial=partial)


class Rules:
    """Over which axes dims of a name are cut, for all tensors; names without a rule are not.

        rules = Rules({"rows": ("z", "x"), "features": "y"})
        rules.layout({"rows": 64, "features": 32})

    An axis cuts a dim at multiples of the dim's unit, as of the features of a head, but for a `Cut` with another one.
    """

    def __init__(self, axes: Mapping[str, Axes]):
        self.axes = {name: as_cuts(each) for name, each in axes.items()}

    def layout(self, dims: Mapping[str, int | tuple[int, int]], partial: str | Sequence[str] = ()) -> Layout:
        """Of a tensor with these dims, in this order: length, or length and unit.

        >>> rules = Rules({"heads": ("x", Cut("z", 1))})
        >>> rules.layout({"heads": (12, 4), "features": 8}).slices({"x": 2, "z": 3}, {"x": 1, "z": 0})
        (slice(8, 10, None), slice(0, 8, None))
        """
        lengths = {name: each if isinstance(each, tuple) else (each, 1) for name, each in dims.items()}
        axes = {
            dim: [Cut(cut.axis, unit if cut.unit is None else cut.unit) for cut in self.axes.get(name, ())]
            for dim, (name, (_, unit)) in enumerate(lengths.items())
        }
        return Layout.of([length for length, _ in lengths.values()], axes, partial)


def as_cuts(axes: Axes) -> tuple[Cut, ...]:
    """
    >>> as_cuts("x"), as_cuts(("z", Cut("x", 4)))
    ((Cut(axis='x', unit=None),), (Cut(axis='z', unit=None), Cut(axis='x', unit=4)))
    """
    several = (axes,) if isinstance(axes, (str, Cut)) else axes
    return tuple(Cut(each) if isinstance(each, str) else each for each in several)


def index_of(axis: str, sizes: Mapping[str, int], place: Mapping[str, int]) -> int:
    """Rank along an axis, which may be several joined, row-major."""
    index = 0
    for part in parts_of(axis):
        index = index * sizes[part] + place[part]
    return index


def steps(source: Layout, target: Layout, sizes: Mapping[str, int]) -> list[tuple[Layout, Layout]]:
    """The moves that take one layout to the other: one, or two for a sum that several ranks are to have, of which each
    first has its part, as all-reduce is reduce-scatter and all-gather."""
    shared = [axis for axis in source.partial if axis not in target.axes and sizes[axis] > 1]
    if not shared:
        return [(source, target)]
    lengths = [
        length / math.prod(_size(cut.axis, sizes) for cut in cuts) for length, cuts in zip(target.shape, target.cuts)
    ]
    dim = lengths.index(max(lengths))
    cuts = list(target.cuts)
    cuts[dim] += tuple(Cut(axis, 1) for axis in shared)
    between = Layout(target.shape, tuple(cuts))
    return [(source, between), (between, target)]


def elements_received(source: Layout, target: Layout, sizes: Mapping[str, int], place: Mapping[str, int]) -> int:
    """What the rank at `place` has to be sent: its part of the target, of every summand, less what it has of them."""
    total = 0
    for here, there in steps(source, target, sizes):
        owned, wanted = here.slices(sizes, place), there.slices(sizes, place)
        summands = math.prod(sizes[axis] for axis in here.partial)
        total += summands * volume(wanted) - volume(common(owned, wanted))
    return total


def common(a: Slices, b: Slices) -> Slices:
    return tuple(slice(start := max(p.start, q.start), max(start, min(p.stop, q.stop))) for p, q in zip(a, b))


def volume(part: Slices) -> int:
    return math.prod(each.stop - each.start for each in part)


def _size(axis: str, sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[part] for part in parts_of(axis))


def _check(layout: Layout) -> None:
    named = [*layout.axes, *layout.partial]
    if len({*named}) < len(named):
        raise ValueError(f"a layout names every axis once, got {', '.join(named)}")
    if unknown := [axis for axis in named if axis not in (*AXES, "expert", "copies")]:
        raise ValueError(f"a grid has the axes {', '.join(AXES)}, expert and copies, got {unknown[0]!r}")
    experts = {"expert", "copies"} & {*named}
    if experts and not {*named}.isdisjoint(JOINED["stage"]):
        raise ValueError(f"a layout has the axes of experts or those that they divide again, got {', '.join(named)}")
    for length, cuts in zip(layout.shape, layout.cuts):
        if wrong := [cut for cut in cuts if length % (cut.unit or 1)]:
            raise ValueError(f"a dim of {length} cannot be cut in units of {wrong[0].unit} over {wrong[0].axis}")
