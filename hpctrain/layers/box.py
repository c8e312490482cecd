"""The linear layer's product in a box of ranks: Agarwal's."""

from __future__ import annotations

import torch

from hpctrain.layers.spread import Columns, Rows
from hpctrain.shard import Shard, split, split_sizes, subsplit


class BoxProduct:
    """y = x Wᵀ + b by Agarwal's product; `weight` and `bias` say what a rank holds of W and b."""

    def __init__(self, algorithm, in_features, out_features, to_inner, in_unit, out_unit):
        x, y, z = algorithm.x, algorithm.y, algorithm.z
        self.to_inner = to_inner
        over_out, over_in = (x, y) if to_inner else (y, x)
        rows = split(out_features, over_out.size, over_out.rank, out_unit)
        columns = split(in_features, over_in.size, over_in.rank, in_unit)
        block = rows.stop - rows.start
        self.over_z = Rows(z, split_sizes(block, z.size))
        self.weight = Shard((out_features, in_features), (subsplit(rows, z.size, z.rank), columns))
        # The side in the inner layout is spread over y inside its block over x.
        if to_inner:
            self.inner = Columns(y, split_sizes(block, y.size, out_unit))
            self.bias = Shard((out_features,), (subsplit(rows, y.size, y.rank, out_unit),), ("z",))
        else:
            self.inner = Columns(y, split_sizes(columns.stop - columns.start, y.size, in_unit))
            self.bias = Shard((out_features,), (rows,), ("x", "z"))

    def __call__(self, x, weight, bias, tokens):
        source, target = (tokens.rows, self.inner) if self.to_inner else (self.inner, tokens.rows)
        return _Product.apply(x, weight, bias, source, target, self.over_z)


class _Product(torch.autograd.Function):
    """Gathers both operands, multiplies, reduce-scatters the result. Keeps only what each rank was given."""

    @staticmethod
    def forward(ctx, x, weight, bias, source, target, over_z):
        ctx.save_for_backward(x, weight)
        ctx.source, ctx.target, ctx.over_z = source, target, over_z
        return target.multiply(source.gather(x), over_z.gather(weight).t(), bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_bias = grad.sum(0) if ctx.needs_input_grad[2] else None
        grad = ctx.target.gather(grad)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = ctx.source.multiply(grad, ctx.over_z.gather(weight))
        place = getattr(weight, "place", None)
        out = place.take() if place and ctx.over_z.axis.size == 1 else None
        grad_weight = ctx.over_z.multiply(grad.t(), ctx.source.gather(x), out=out)
        return grad_x, grad_weight, grad_bias, None, None, None
