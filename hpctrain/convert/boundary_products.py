"""Products at the boundary of a divided unit, in one step with its messages, and without copies for them.

What the ranks are to add up is multiplied into memory that all of them read, and what they gather is multiplied where
it comes: as in `matmul.Agarwal`, whose `nn` and `tn` on (t, 1, 1) these are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hpctrain import comm, gemm
from hpctrain.comm import functional
from hpctrain.comm.out_of_place import sum_of_summands, summand_for
from hpctrain.convert import boundary
from hpctrain.convert.gathering_again import gathering_again
from hpctrain.convert.linear import WeightAndBias, gradient_of, is_plain, linear, linears, products
from hpctrain.convert.sharded_activation import ShardedActivation, enter, gives_whole, leave, of_rows, rows_of
from hpctrain.convert.sharding import local
from hpctrain.grid import Axis

LARGEST = 1 << 21  # elements of a sum, above which it passes through shared memory in pieces


class Whole(NamedTuple):
    """A `Way` from and to matrices that every rank has, the same outside."""

    axis: Axis

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        return boundary.enter(x, self.axis) if torch.is_grad_enabled() else x

    def summand(self, rows: int, width: int, like: torch.Tensor) -> torch.Tensor:
        return summand_for((rows, width), self.axis, like)

    def outside(self, summand: torch.Tensor) -> torch.Tensor:
        return sum_of_summands(summand, self.axis)

    def leave(self, summand: torch.Tensor) -> torch.Tensor:
        return boundary.leave(summand, self.axis)


class Rows(NamedTuple):
    """A `Way` from and to matrices of which rank r has counts[r] rows outside."""

    axis: Axis
    counts: tuple[int, ...]

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            return functional.all_gather(x, self.axis, self.counts)
        return comm.workspace(self.axis, x).gather(x, self.counts)

    def summand(self, rows: int, width: int, like: torch.Tensor) -> torch.Tensor:
        return comm.workspace(self.axis, like).buffer(rows * width, like).view(rows, width)

    def outside(self, summand: torch.Tensor) -> torch.Tensor:
        return comm.reduce_rows(comm.workspace(self.axis, summand), summand, self.counts)

    def leave(self, summand: torch.Tensor) -> torch.Tensor:
        return functional.reduce_scatter(summand, self.axis, self.counts)


def entering(x: torch.Tensor, layers: Sequence[WeightAndBias], axis: Axis) -> list[torch.Tensor]:
    """F.linear of an activation from outside by this rank's part of each layer, to rounding."""
    rows, shape, way = _of_input(x, axis)
    if way is None or not is_plain(rows, layers):
        inside = enter(x, axis)
        with gathering_again(inside):
            return linears(inside, layers)
    return products(rows, layers, shape[:-1], way)


def leaving(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, start: int, axis: Axis, shards: bool
) -> torch.Tensor:
    """The sum of every rank's F.linear, as `leave` gives it, to rounding. `bias` is for output features from `start`
    on."""
    shape = torch.Size((*x.shape[:-1], len(weight)))
    way = _of_output(shape, axis, shards)
    if way is None or not is_plain(x, [(weight, bias)]):
        y = linear(x, weight)
        if bias is not None:
            y.narrow(-1, start, len(bias)).add_(bias)
        return leave(y, axis, shards)
    y = _Leaving.apply(way, x.flatten(0, -2), weight, bias, start)
    if isinstance(way, Whole):
        return torch.ops.aten._unsafe_view(y, shape)
    return of_rows(torch.ops.aten._unsafe_view(y, y.shape), axis, shape)


def _of_input(x, axis):
    """This rank's tensor, the shape of the whole, and how it comes inside; None where it does by itself."""
    if not isinstance(x, ShardedActivation):
        return x, x.shape, Whole(axis) if axis.size > 1 and x.numel() <= LARGEST else None
    over, shape = x.over, x.whole_shape
    return x.rows(), shape, Rows(axis, over.counts) if over.in_order and shape.numel() <= LARGEST else None


def _of_output(shape, axis, shards):
    if axis.size == 1 or shape.numel() > LARGEST:
        return None
    if not shards or gives_whole():
        return Whole(axis)
    over = rows_of(shape, axis)
    return Rows(axis, over.counts) if over.in_order else None


class _Leaving(torch.autograd.Function):
    @staticmethod
    def forward(ctx, way, x, weight, bias, start):
        ctx.save_for_backward(x, weight)
        ctx.way, ctx.features = way, slice(start, start if bias is None else start + len(bias))
        summand = gemm.mm(x, weight.t(), out=way.summand(len(x), len(weight), x))
        if bias is not None:
            summand[:, ctx.features].add_(bias)
        return way.outside(summand)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        _, needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        with local():
            grad = ctx.way.inside(grad)
            return (
                None,
                gemm.mm(grad, weight) if needs_x else None,
                gradient_of(weight, grad, x) if needs_weight else None,
                grad[:, ctx.features].sum(0) if needs_bias else None,
                None,
            )
