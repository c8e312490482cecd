"""Feed-forward blocks and attention on a box of ranks (x, y, z), by Agarwal's product: blocks of weights and of
activations.

Between blocks each rank has some tokens (`token_rows`). The products up take tokens over z with features over y, and
weights over x and y, which are gathered over z; their sums over y leave features over x and y. In the product down, x
and y change places. So the activation in between, of (tokens over z, features over x and y), lies on one rank. For
attention, which is of all tokens, heads are divided over z as well instead, and come back.

Source: as of `layers.Linear`. What a rank receives is the same, but for T h (1 - 1/y) / (xyz) elements more for each
gathering and each sum of T tokens of h features, as tokens here have all of their features between blocks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hpctrain.comm.functional import reshard
from hpctrain.convert.gathering_again import gathering_again, once_more
from hpctrain.convert.linear import linear
from hpctrain.convert.plain import those_with
from hpctrain.convert.products import SplitLinear, split_linear
from hpctrain.convert.sharded_activation import ShardedActivation, of_rows, rows_in
from hpctrain.convert.sharding import local
from hpctrain.convert.token_rows import OVER
from hpctrain.convert.unit_calls import UnitCalls
from hpctrain.convert.unit_module import Unit, enclose
from hpctrain.grid import Grid
from hpctrain.layout import Axes, Cut, Layout

if TYPE_CHECKING:
    from hpctrain.convert.plan import Plan


@dataclasses.dataclass
class Entered:
    """What a block works on now.

    Attributes:
        over_tokens: whether what lies between the products is of tokens over z, and features over x and y; otherwise of
            all tokens, and features over x, y and z.
        shape: of the whole input that came last.
        inside: {id of an input: it, its part}.
    """

    grid: Grid
    over_tokens: bool
    shape: tuple[int, ...] = ()
    inside: dict[int, tuple[torch.Tensor, torch.Tensor]] = dataclasses.field(default_factory=dict)

    def clear(self) -> None:
        self.inside.clear()

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens over z, features over y)."""
        self.shape = tuple(x.whole_shape if isinstance(x, ShardedActivation) else x.shape)
        if id(x) not in self.inside:
            shape = math.prod(self.shape[:-1]), self.shape[-1]
            source, target = Layout.of(shape, {0: OVER}), Layout.of(shape, {0: "z", 1: "y"})
            gather = functools.partial(reshard, source=source, target=target, grid=self.grid)
            self.inside[id(x)] = x, once_more(gather, rows_in(x, self.grid.tensor))
        return self.inside[id(x)][1]

    def between(self, dim: int, unit: int) -> dict[int, Axes]:
        """How what lies between the products is cut, its features in dim `dim`."""
        return {0: "z", dim: _cut(unit, "x", "y")} if self.over_tokens else {dim: _cut(unit, "x", "y", "z")}


class EnteredOnce(Entered):
    """Of a block with one layer up; nobody says when its call ends."""

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        inside = super().enter(x)
        self.clear()
        return inside


def _cut(unit, *axes) -> tuple[Cut, ...]:
    return tuple(Cut(axis, unit) for axis in axes)


class BoxLinear(SplitLinear):
    """Mixin for nn.Linear, and for Hugging Face's Conv1D.

    Attributes:
        entered: of the block.
        features: out and in, of each of `fused` matrices.
        unit: features between the products that stay together.
        transposed: the weight is (in, out).
    """

    enters = leaves = False
    entered: Entered
    features: tuple[int, int]
    fused: int
    unit: int
    transposed: bool

    def full_weight(self, over_out: Cut, over_in: Cut) -> torch.Tensor:
        """(fused × out, in), gathered over z."""
        shape = self.fused, *self.features
        source, target = (Layout.of(shape, {1: out, 2: over_in}) for out in ((over_out, Cut("z", 1)), over_out))

        def gather(part):
            part = (part.t() if self.transposed else part).unflatten(0, (self.fused, -1))
            return reshard(part, source, target, self.entered.grid).flatten(0, 1)

        return once_more(gather, self.weight)


class BoxUp(BoxLinear):
    def run(self, x: torch.Tensor, enters: bool, leaves: bool) -> torch.Tensor:
        with local():
            entered, unit = self.entered, self.unit
            inside, weight = entered.enter(x), self.full_weight(Cut("x", unit), Cut("y", 1))
            with gathering_again(inside, weight):
                summand = linear(inside, weight).unflatten(1, (self.fused, -1))
            shape, between = (math.prod(entered.shape[:-1]), self.fused, self.features[0]), entered.between(2, unit)
            source = Layout.of(shape, {0: "z", 2: Cut("x", unit)}, "y")
            y = reshard(summand, source, Layout.of(shape, between), entered.grid)
            if (bias := self._parameters["bias"]) is not None:
                cuts = {1: _cut(unit, "x", "y", "z")}, {1: between[2]}
                source, target = (Layout.of(shape[1:], each) for each in cuts)
                y = y + reshard(bias.unflatten(0, (self.fused, -1)), source, target, entered.grid)
            leading = (*[1] * (len(entered.shape) - 2), len(y)) if entered.over_tokens else entered.shape[:-1]
            return y.reshape(*leading, y.shape[1] * y.shape[2])


class BoxDown(BoxLinear):
    def run(self, x: torch.Tensor, enters: bool, leaves: bool) -> torch.Tensor:
        with local():
            entered, (out, into), over_in = self.entered, self.features, Cut("x", self.unit)
            leading = entered.shape[:-1] if entered.over_tokens else tuple(x.shape[:-1])
            count, grid = math.prod(leading), entered.grid
            source = Layout.of((count, into), entered.between(1, self.unit))
            target = Layout.of((count, into), {0: "z", 1: over_in})
            gather = functools.partial(reshard, source=source, target=target, grid=grid)
            inside = once_more(gather, x.reshape(-1, x.shape[-1]))
            weight = self.full_weight(Cut("y", 1), over_in)
            with gathering_again(inside, weight):
                summand = linear(inside, weight)
            source = Layout.of((count, out), {0: "z", 1: "y"}, "x")
            rows = reshard(summand, source, Layout.of((count, out), {0: OVER}), grid)
            if (bias := self._parameters["bias"]) is not None:
                rows = rows + reshard(bias, Layout.of((out,), {0: ("x", "y", "z")}), Layout.of((out,), {}), grid)
            return of_rows(rows, grid.tensor, (*leading, out))


def split_block(plan: Plan, module: nn.Module, ups: list[nn.Module], down: nn.Module, fused: int = 1) -> None:
    """On what its products up make the block works element by element; see `feed_forward`."""
    entered = Entered(plan.grid, over_tokens=True)
    for layer in ups:
        split_up(plan, layer, entered, fused)
    split_down(plan, down, entered)
    plan.swap_class(module, Unit)
    enclose(plan, module, entered, [*ups, down])


def split_pair(
    plan: Plan, up: nn.Module, down: nn.Module, between: tuple[nn.Module, ...],
    planned: Sequence[tuple[Any, str, Any]], calls: UnitCalls, over_tokens: bool = True,
) -> None:  # fmt: skip
    """Two layers that are no module of their own, and what is between them: on a box, see `Entered`, or in one line.

    Args:
        planned: what has to be as it is now; see `SplitLinear`.
    """
    if plan.box:
        entered = EnteredOnce(plan.grid, over_tokens)
        split_up(plan, up, entered)
        split_down(plan, down, entered)
    else:
        split_linear(plan, up, by_output=True, leaves=False)
        split_linear(plan, down, by_output=False, enters=False)
    plan.change(up, unit_calls=calls, planned=those_with(down, planned))
    plan.change(down, unit_calls=calls, between=between, planned=planned)


def split_up(plan: Plan, layer: nn.Module, entered: Entered, fused: int = 1, unit: int = 1) -> None:
    _split(plan, layer, BoxUp, entered, fused, unit, (Cut("x", unit), Cut("z", 1)), "y", _cut(unit, "x", "y", "z"))


def split_down(plan: Plan, layer: nn.Module, entered: Entered, unit: int = 1) -> None:
    _split(plan, layer, BoxDown, entered, 1, unit, ("y", "z"), Cut("x", unit), ("x", "y", "z"))


def _split(plan, layer, mixin, entered, fused, unit, over_out, over_in, over_bias):
    transposed = type(layer).__name__ == "Conv1D"
    out, into = layer.weight.shape[::-1] if transposed else layer.weight.shape
    over, shape = [over_out, over_in], [out // fused, into]
    if transposed:
        over.reverse()
        shape.reverse()
    cuts, place = dict(enumerate(over)), int(transposed)  # of out, before which matrices are stacked
    if fused > 1:
        shape.insert(place, fused)
        cuts = {dim + (dim >= place): axes for dim, axes in cuts.items()}
    plan.split_blocks(layer, "weight", Layout.of(shape, cuts), place + 1)
    bias = [fused] * (fused > 1) + [out // fused]
    plan.split_blocks(layer, "bias", Layout.of(bias, {len(bias) - 1: over_bias}), 1)
    plan.swap_class(
        layer, mixin, axis=plan.axis, entered=entered, features=(out // fused, into), fused=fused, unit=unit,
        transposed=transposed,
    )  # fmt: skip
