"""Feed-forward blocks on a box of ranks (x, y, z), by Agarwal's product: blocks of weights and of activations.

Between blocks each rank has some tokens (`token_rows`). The products up take tokens over z with features over y, and
weights over x and y, which are gathered over z; their sums over y leave features over x and y. In the product down, x
and y change places. So the activation in between, of (tokens over z, features over x and y), lies on one rank.

Source: as of `layers.Linear`. What a rank receives is the same, but for T h (1 - 1/y) / (xyz) elements more for each
gathering and each sum of T tokens of h features, as tokens here have all of their features between blocks.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from hpctrain.comm.functional import reshard
from hpctrain.convert.gathering_again import gathering_again, once_more
from hpctrain.convert.products import SplitLinear, Unit
from hpctrain.convert.sharded_activation import ShardedActivation, rows_of, sharded
from hpctrain.convert.sharding import local
from hpctrain.convert.token_rows import OVER
from hpctrain.grid import Grid
from hpctrain.layout import Layout

if TYPE_CHECKING:
    from hpctrain.convert.plan import Plan


@dataclasses.dataclass
class Entered:
    """What a block works on now. Attributes: `shape`, of its whole input; `inside`, {id of an input: it, its part}."""

    grid: Grid
    shape: torch.Size = torch.Size()
    inside: dict[int, tuple[torch.Tensor, torch.Tensor]] = dataclasses.field(default_factory=dict)

    def clear(self) -> None:
        self.inside.clear()

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens over z, features over y)."""
        if id(x) not in self.inside:
            if isinstance(x, ShardedActivation):
                self.shape, rows = x.whole_shape, x.rows()
            else:
                self.shape, rows = x.shape, rows_of(x.shape, self.grid.tensor).take(x.reshape(-1, x.shape[-1]))
            moved = {0: OVER}, {0: "z", 1: "y"}
            self.inside[id(x)] = x, once_more(lambda part: self.move(part, self.shape[-1], *moved), rows)
        return self.inside[id(x)][1]

    def move(self, x: torch.Tensor, features: int, source: dict, target: dict, partial: tuple = ()) -> torch.Tensor:
        """Activations of so many features, (tokens, …, features), from one layout to another."""
        shape = (math.prod(self.shape[:-1]), *x.shape[1:-1], features)
        return reshard(x, Layout.of(shape, source, partial), Layout.of(shape, target), self.grid)


class BoxLinear(SplitLinear):
    """Mixin for nn.Linear, and for Hugging Face's Conv1D.

    Attributes:
        entered: of the block.
        features: out and in, of each of `fused` matrices.
        transposed: the weight is (in, out).
    """

    enters = leaves = False

    def full_weight(self, over_out: str, over_in: str) -> torch.Tensor:
        """(fused × out, in), gathered over z."""

        def gather(part):
            part = (part.t() if self.transposed else part).unflatten(0, (self.fused, -1))
            layouts = (
                Layout.of((self.fused, *self.features), {1: out, 2: over_in}) for out in ((over_out, "z"), over_out)
            )
            return reshard(part, *layouts, self.entered.grid).flatten(0, 1)

        return once_more(gather, self._parameters["weight"])

    def full_bias(self, over_out: tuple[str, ...]) -> torch.Tensor | None:
        """(fused, out)"""
        bias, shape = self._parameters["bias"], (self.fused, self.features[0])
        if bias is None:
            return None
        layouts = (Layout.of(shape, {1: over}) for over in (("x", "y", "z"), over_out))
        return reshard(bias.unflatten(0, (self.fused, -1)), *layouts, self.entered.grid)


class BoxUp(BoxLinear):
    def run(self, x: torch.Tensor, enters: bool, leaves: bool) -> torch.Tensor:
        with local():
            inside, weight, bias = self.entered.enter(x), self.full_weight("x", "y"), self.full_bias(("x", "y"))
            with gathering_again(inside, weight):
                summand = F.linear(inside, weight).unflatten(1, (self.fused, -1))
            y = self.entered.move(summand, self.features[0], {0: "z", 2: "x"}, {0: "z", 2: ("x", "y")}, ("y",))
            y = (y if bias is None else y + bias).flatten(1)
            return y.view(*[1] * (len(self.entered.shape) - 2), *y.shape)


class BoxDown(BoxLinear):
    def run(self, x: torch.Tensor, enters: bool, leaves: bool) -> torch.Tensor:
        with local():
            entered, (out, into) = self.entered, self.features
            hidden = {0: "z", 1: ("x", "y")}, {0: "z", 1: "x"}
            inside = once_more(lambda part: entered.move(part, into, *hidden), x.reshape(-1, x.shape[-1]))
            weight, bias = self.full_weight("y", "x"), self.full_bias(())
            with gathering_again(inside, weight):
                summand = F.linear(inside, weight)
            rows = entered.move(summand, out, {0: "z", 1: "y"}, {0: OVER}, ("x",))
            rows = rows if bias is None else rows + bias
            shape, axis = (*entered.shape[:-1], out), entered.grid.tensor
            if torch.is_inference_mode_enabled():
                return rows_of(shape, axis).gather(rows).view(shape)
            return sharded(rows, axis, shape)


def split_block(plan: Plan, module: nn.Module, ups: list[nn.Module], down: nn.Module, fused: int = 1) -> None:
    """On what its products up make the block works element by element; see `feed_forward`."""
    entered = Entered(plan.grid)
    for layer in ups:
        _split(plan, layer, BoxUp, ("x", "z"), "y", fused, entered=entered)
    _split(plan, down, BoxDown, ("y", "z"), "x", 1, entered=entered)
    plan.swap_class(module, Unit)
    plan.change(module, entered=entered, planned=dict(module._modules))


def _split(plan, layer, mixin, over_out, over_in, fused, **attributes: Any):
    transposed = type(layer).__name__ == "Conv1D"
    out, into = layer.weight.shape[::-1] if transposed else layer.weight.shape
    over, shape = [over_out, over_in], [out // fused, into]
    if transposed:
        over.reverse()
        shape.reverse()
    stacked = [fused] * (fused > 1)
    cuts = {len(stacked) + dim: axes for dim, axes in enumerate(over)}
    plan.split_blocks(layer, "weight", Layout.of((*stacked, *shape), cuts))
    plan.split_blocks(layer, "bias", Layout.of((*stacked, out // fused), {len(stacked): ("x", "y", "z")}))
    plan.swap_class(layer, mixin, features=(out // fused, into), fused=fused, transposed=transposed, **attributes)
