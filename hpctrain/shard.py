"""Which slice of a global tensor a rank holds, and along which axes other ranks hold the same one."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Shard:
    """A rank's part of a global tensor, written once, on the parameter, by the layer that makes it.

    Attributes:
        global_shape: shape of the whole tensor.
        slices: for each dim, the range of it that this rank holds.
        replicated: tensor axes along which other ranks hold this same slice.
        partial: each of those ranks sees other tokens, so that its gradient is a partial sum, completed over these
            axes; otherwise each computes the whole gradient.
        holders: ranks of the pipeline axis that hold the slice, in order, when more than one does (tied embeddings,
            schedules with two replicas of a stage); their gradients are summed, and the first one counts.
        alike: axis along which all ranks hold this same slice, beside those of `replicated`; their gradients are
            partial sums. "data", or "copies" for experts that are spread over ranks, see `expert_shard`.
    """

    global_shape: tuple[int, ...]
    slices: tuple[slice, ...]
    replicated: tuple[str, ...] = ()
    holders: tuple[int, ...] = ()
    partial: bool = True
    alike: str = "data"

    @classmethod
    def whole(cls, shape: Sequence[int], replicated: tuple[str, ...] = ()) -> Shard:
        """Of a tensor of which a rank has all."""
        return cls(tuple(shape), tuple(slice(0, size) for size in shape), replicated)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(part.stop - part.start for part in self.slices)

    @property
    def divided(self) -> bool:
        """Whether other ranks hold other parts of the tensor."""
        return self.shape != self.global_shape

    def owned(self, coords: dict[str, int]) -> bool:
        """Whether the rank at `coords` is the one that counts this slice, among those that hold it and are at the same
        place along the axis `alike`."""
        first = all(coords[axis] == 0 for axis in self.replicated)
        return first and (not self.holders or coords["pipeline"] == self.holders[0])


def expert_shard(
    global_shape: tuple[int, ...], ranks: int, rank: int, tensor: int = 1, divided: int | None = None
) -> Shard:
    """Of a parameter of experts, which are its dim 0, on a rank of the axis `expert`, of so many. Each `tensor`
    neighbours of these have the same experts, whose dim `divided` they share.

    Every rank of a stage has tokens of its own. Where none has the others' experts, those that have the same lie along
    `copies`; where all have all of them, they are weights as any others, replicated over the tensor axes.

    >>> expert_shard((5, 8, 4), 2, 1)
    Shard(global_shape=(5, 8, 4), slices=(slice(3, 5, None), slice(0, 8, None), slice(0, 4, None)), replicated=(),
          holders=(), partial=True, alike='copies')
    >>> expert_shard((5, 8, 4), 4, 1, tensor=2, divided=1).slices
    (slice(0, 3, None), slice(4, 8, None), slice(0, 4, None))
    """
    group, part = divmod(rank, tensor)
    slices = [split(global_shape[0], ranks // tensor, group), *(slice(0, length) for length in global_shape[1:])]
    if divided is not None:
        slices[divided] = split(global_shape[divided], tensor, part)
    if ranks == 1:
        return Shard(global_shape, tuple(slices), replicated=("x", "y", "z"))
    return Shard(global_shape, tuple(slices), alike="copies")


def check_shards(model: torch.nn.Module) -> None:
    """Raise ValueError for a parameter without its `Shard`."""
    for name, parameter in model.named_parameters():
        if not hasattr(parameter, "shard"):
            raise ValueError(
                f"the weight {name!r} is of a layer that was added after parallelize, or that is none of ht.layers, or "
                "it took the place of theirs; add it before, and list it in replicate where it is to stay whole, and "
                "of a weight of your own beside ht.layers, whole on every rank, say so: weight.shard = "
                'ht.Shard.whole(weight.shape, ("x", "y", "z"))'
            )


def split(length: int, parts: int, index: int, unit: int = 1) -> slice:
    """Range `index` of `parts` balanced ranges of `length`, cut only at multiples of `unit`.

    The first ranges are the longer ones, by one unit; with more parts than units, the last are empty.

    >>> [split(7, 3, i) for i in range(3)]
    [slice(0, 3, None), slice(3, 5, None), slice(5, 7, None)]
    >>> [split(12, 2, i, unit=4) for i in range(2)]
    [slice(0, 8, None), slice(8, 12, None)]
    """
    assert length % unit == 0, f"{length} is not a multiple of {unit}"
    small, longer = divmod(length // unit, parts)
    start = (small * index + min(index, longer)) * unit
    return slice(start, start + (small + (index < longer)) * unit)


def subsplit(part: slice, parts: int, index: int, unit: int = 1) -> slice:
    """Range `index` of `parts` balanced ranges of an already cut range.

    >>> [subsplit(slice(4, 9), 2, i) for i in range(2)]
    [slice(4, 7, None), slice(7, 9, None)]
    """
    inner = split(part.stop - part.start, parts, index, unit)
    return slice(part.start + inner.start, part.start + inner.stop)


@functools.lru_cache(maxsize=1024)  # layers ask for the same ones in every call
def split_sizes(length: int, parts: int, unit: int = 1) -> tuple[int, ...]:
    """Lengths of the ranges that `split` gives.

    >>> split_sizes(7, 3), split_sizes(2, 4), split_sizes(12, 2, unit=4)
    ((3, 2, 2), (1, 1, 0, 0), (8, 4))
    """
    return tuple(part.stop - part.start for part in (split(length, parts, i, unit) for i in range(parts)))
