"""What a tensor is a part of, where ranks hold different parts of a gradient or a weight."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from hpctrain.convert.sharding import Sharding
from hpctrain.grid import Axis, Grid


@dataclass(frozen=True)
class Part:
    """Of which gradient, or weight, a tensor is a part.

    Attributes: `name` of the parameter; `grid`, of a gradient that backward left; `axes`, over whose ranks different
    parts lie; `complete`, which averages the gradients of the replicas, where that is done when they are needed, and
    which a gradient does not keep: torch keeps the gradient of a weight, where Python's collector sees no circle;
    `sharding`, by which the whole is gathered, where a rank has the part that it says; `dims` of a gradient of which
    replicas have flat ranges.
    """

    name: str
    grid: Grid | None = None
    axes: tuple[Axis, ...] = ()
    complete: weakref.WeakMethod | None = None
    sharding: Sharding | None = None
    dims: int = 0

    @property
    def divided(self) -> bool:
        return bool(self.axes)

    @property
    def of_weight(self) -> bool:
        return self.sharding is not None and self.grid is None


def name_of(part: Part | None) -> str:
    """The gradient or weight, as error messages call it; None stands for several gradients."""
    if part is None:
        return "several gradients put together"
    return f"{'the weight' if part.of_weight else 'the gradient of'} {part.name!r}"
