"""The linear layer's product on a plane of ranks: Cannon's, SUMMA's and the 2.5-D one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hpctrain.layers.parameter import ProductQueue, put_off
from hpctrain.once_differentiable import once_differentiable

if TYPE_CHECKING:
    from hpctrain.layers.algorithm import PlaneAlgorithm
    from hpctrain.layers.tokens import Tokens


class PlaneProduct:
    """y = x Wᵀ + b; `weight` and `bias` say what a rank holds of W and b.

    W has its rows over x and its columns over y, as x and y have. The output features are therefore cut over both axes
    (see `matmul.plane`), and forward and both gradients are the three products of that one dim.
    """

    def __init__(
        self,
        algorithm: PlaneAlgorithm,
        in_features: int,
        out_features: int,
        to_inner: bool,
        in_unit: int,
        out_unit: int,
    ):
        self.matmul = algorithm.matmul
        self.split_backward: ProductQueue | None = None  # of a model whose backwards are split
        self.sizes = self.matmul.cut(out_features, out_unit)
        over_out, over_in, of_y = (
            ("inner out", "residual in", "inner features") if to_inner else ("residual out", "inner in", "features")
        )
        self.weight = algorithm.shard({over_out: (out_features, out_unit), over_in: (in_features, in_unit)})
        self.bias = algorithm.shard({of_y: (out_features, out_unit)})

    def shape_of_input(self, tokens: Tokens) -> tuple[int, int]:
        """Of this rank's part of x."""
        return tokens.local_rows, self.weight.shape[1]

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tokens: Tokens
    ) -> torch.Tensor:
        return _PlaneLinear.apply(x, weight, bias, self, tokens.over_z)


class _PlaneLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, product, rows):
        ctx.save_for_backward(x, weight)
        ctx.weight = weight  # as in layers.box
        ctx.product, ctx.rows = product, rows
        y = product.matmul.nt(x, weight, product.sizes, rows)
        return (y if bias is None else y.add_(bias)).detach()  # as in layers.box

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (x, _), weight = ctx.saved_tensors, ctx.weight
        matmul, sizes, rows = ctx.product.matmul, ctx.product.sizes, ctx.rows
        grad = grad.contiguous()
        grad_bias = grad.sum(0) if ctx.needs_input_grad[2] else None
        grad_x = matmul.nn(grad, weight, sizes, rows) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if not put_off(ctx.product.split_backward, weight, late := lambda: matmul.tn(grad, x, sizes, rows)):
            grad_weight = late() if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, grad_bias, None, None
