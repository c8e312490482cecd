"""Over which axes the dims of weights and activations are cut: the one table that layers read (see `hpctrain.layout`).

A dim is cut at multiples of its unit, such as the features of a head or the tokens of a sequence, but by elements where
`_e` says so. A weight is (out, in); that of a layer to="inner" takes the residual layout to the inner one.
"""

from __future__ import annotations

from hpctrain.grid import Grid
from hpctrain.layout import Cut, Rules
from hpctrain.shard import Shard


def _e(axis: str) -> Cut:
    return Cut(axis, 1)


BOX = Rules(
    {
        # activations
        "rows": ("z", _e("x")), "features": "y", "inner rows": "z", "inner features": ("x", "y"),
        # weights: to="inner", then to="residual", in which x and y change places
        "inner out": ("x", _e("z")), "residual in": "y",
        "residual out": ("y", _e("z")), "inner in": "x",
    }
)  # fmt: skip
PLANE = Rules(
    {
        "rows": ("z", "x"), "features": "y", "inner rows": ("z", "x"), "inner features": "y",
        "inner out": ("x", _e("z")), "residual in": "y",
        "residual out": ("x", _e("z")), "inner in": "y",
    }
)  # fmt: skip
IMAGES = Rules(
    {
        "images": "z", "channels": "x", "height": "y",
        # weights of convolutions, which either gather their input's channels or scatter their output's
        "own out": ("x", "y+z"), "every out": "y+z", "own in": "x",
    }
)  # fmt: skip
WHOLE = Rules({})


def shard(rules: Rules, grid: Grid, dims: dict[str, int | tuple[int, int]]) -> Shard:
    """Of this rank's part of a parameter with these dims; lengths, or lengths and units."""
    return rules.layout(dims).shard(grid.sizes, grid.coords)
