"""The linear layer's product in a box of ranks: Agarwal's."""

from __future__ import annotations

import functools

import torch

from hpctrain.layers.parameter import accumulate
from hpctrain.layers.spread import Columns, Rows
from hpctrain.shard import Shard, split, split_sizes, subsplit


class BoxProduct:
    """y = x Wᵀ + b by Agarwal's product; `weight` and `bias` say what a rank holds of W and b."""

    def __init__(self, algorithm, in_features, out_features, to_inner, in_unit, out_unit):
        x, y, z = algorithm.x, algorithm.y, algorithm.z
        self.to_inner, self.overlap, self.weights = to_inner, algorithm.overlap, algorithm.weights
        self.number = None  # among the layers of `weights`
        self.later = None  # `layers.later.WeightGradients` of a model whose backwards are split
        self.gathers_backward = True
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
        return _Product.apply(x, weight, bias, source, target, self)

    def gather(self, weight: torch.Tensor, backward: bool) -> torch.Tensor:
        """The weight's rows over z."""
        return self.weights.gather(self.number, weight, backward)

    def weight_gradient(self, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
        """This rank's part of gradᵀ x, or None while it is put off."""
        place, over_z = getattr(weight, "place", None), self.over_z
        if place is None:
            return over_z.multiply(grad.t(), x)
        if over_z.axis.size == 1:
            return over_z.multiply(grad.t(), x, out=place.take())
        if "weight_gradient" in self.overlap and place.direct and not place.last:
            return place.put_off(grad.t(), x, over_z)
        return over_z.multiply(grad.t(), x, plus=place.unsummed())

    def late(self, grad: torch.Tensor, target, x: torch.Tensor, source, weight: torch.Tensor) -> None:
        """The weight gradient that backward put off."""
        accumulate(weight, self.weight_gradient(target.gather(grad), source.gather(x), weight))


class _Product(torch.autograd.Function):
    """Gathers both operands, multiplies, reduce-scatters the result. Keeps only what each rank was given."""

    @staticmethod
    def forward(ctx, x, weight, bias, source, target, product):
        ctx.save_for_backward(x, weight)
        ctx.weight = weight  # where activations are computed once more, what was saved comes back as another object
        ctx.source, ctx.target, ctx.product = source, target, product
        product.gathers_backward = ctx.needs_input_grad[0]
        return target.multiply(source.gather(x), product.gather(weight, backward=False).t(), bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        (x, _), weight = ctx.saved_tensors, ctx.weight
        source, product = ctx.source, ctx.product
        grad_bias = grad.sum(0) if ctx.needs_input_grad[2] else None
        if product.later is not None and product.later.queue is not None:
            product.later.queue.append(functools.partial(product.late, grad, ctx.target, x, source, weight))
            grad_x = None
            if ctx.needs_input_grad[0]:
                grad_x = source.multiply(ctx.target.gather(grad), product.gather(weight, backward=True))
            return grad_x, None, grad_bias, None, None, None
        grad = ctx.target.gather(grad)
        if not ctx.needs_input_grad[0]:
            return None, product.weight_gradient(grad, source.gather(x), weight), grad_bias, None, None, None
        if source.axis.size == 1 or "input_gradient" not in product.overlap:
            grad_x = source.multiply(grad, product.gather(weight, backward=True))
            return grad_x, product.weight_gradient(grad, source.gather(x), weight), grad_bias, None, None, None
        # x is gathered first: its barrier, after the sum is begun, would be one for the sum to wait for.
        rows = source.gather(x)
        begun = source.multiply_start(grad, product.gather(weight, backward=True))
        grad_weight = product.weight_gradient(grad, rows, weight)
        return begun.wait().view(x.shape), grad_weight, grad_bias, None, None, None
