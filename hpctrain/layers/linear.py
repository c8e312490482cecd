"""Linear layers by Agarwal's 3-D matrix product on the x × y × z box.

Source: Agarwal, Balle, Gustavson, Joshi and Palkar, "A three-dimensional approach to parallel matrix multiplication",
IBM J. Res. Dev. 39 (1995); alternated over the layers of a network as in Singh and Bhatele, "A 4D hybrid algorithm to
scale parallel training to thousands of GPUs" (2023), with every operand and result spread over all ranks.
"""

from __future__ import annotations

import torch

from hpctrain.layers.parameter import drawn_key, parameter
from hpctrain.layers.spread import Columns, Rows
from hpctrain.layers.tokens import Tokens
from hpctrain.randomness import Key
from hpctrain.shard import Shard, split, split_sizes, subsplit


class Linear(torch.nn.Module):
    """y = x Wᵀ + b, taking the residual layout to the inner one (`to="inner"`) or back (`to="residual"`).

    With `to="inner"` the output features are spread over x (and within that over y, in the result) and the input
    features over y; with `to="residual"` the other way round. Within each block, W's rows are spread over z: no two
    ranks hold the same element. For (t, 1, 1) this is Megatron's column- and row-parallel pair with its norms in
    sequence parallel form.

    Args:
        grid: the process grid; W is split over its tensor axis.
        in_features, out_features: any sizes. Where they do not divide, the first ranks hold one unit more.
        in_unit, out_unit: features that must stay together, such as those of one attention head.
        std: standard deviation of the initial weights; torch's default, uniform, has 1 / sqrt(3 in_features).
        key: names the initial weights; by default drawn from torch's generator.

    Shapes: x is (rows, in_features) in its layout, the result (rows, out_features) in the other. One all-gather of x,
    one of W and one reduce-scatter of y forward; two of each backward.
    """

    def __init__(
        self, grid, in_features: int, out_features: int, bias: bool = True, *, to: str,
        in_unit: int = 1, out_unit: int = 1, std: float | None = None, key: Key | None = None, dtype=None, device=None,
    ):  # fmt: skip
        super().__init__()
        if to not in ("inner", "residual"):
            raise ValueError(f'to must be "inner" or "residual", got {to!r}')
        self.to_inner = to == "inner"
        self.in_features, self.out_features = in_features, out_features
        x, y, z = grid.tensor.x, grid.tensor.y, grid.tensor.z
        self.tensor = grid.tensor
        key = drawn_key(grid, key)
        std = (3 * in_features) ** -0.5 if std is None else std

        over_out, over_in = (x, y) if self.to_inner else (y, x)
        rows = split(out_features, over_out.size, over_out.rank, out_unit)
        columns = split(in_features, over_in.size, over_in.rank, in_unit)
        block = rows.stop - rows.start
        self.over_z = Rows(z, split_sizes(block, z.size))
        held = subsplit(rows, z.size, z.rank)
        shard = Shard((out_features, in_features), (held, columns))
        self.weight = parameter(shard, key / "weight", std, dtype=dtype, device=device)

        # The side in the inner layout is spread over y inside its block over x.
        if self.to_inner:
            self.inner = Columns(y, split_sizes(block, y.size, out_unit))
            bias_shard = Shard((out_features,), (subsplit(rows, y.size, y.rank, out_unit),), ("z",))
        else:
            self.inner = Columns(y, split_sizes(columns.stop - columns.start, y.size, in_unit))
            bias_shard = Shard((out_features,), (rows,), ("x", "z"))
        self.bias = parameter(bias_shard, key / "bias", None, dtype=dtype, device=device) if bias else None

    def forward(self, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        source, target = (tokens.rows, self.inner) if self.to_inner else (self.inner, tokens.rows)
        return _Product.apply(x, self.weight, self.bias, source, target, self.over_z)

    def extra_repr(self):
        return f"{self.in_features}, {self.out_features}, to={'inner' if self.to_inner else 'residual'}"


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
