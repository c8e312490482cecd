"""The linear layer's product on a box of ranks: Agarwal's."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from hpctrain import comm
from hpctrain.grad_sync import grad_sync_of_backward
from hpctrain.layers.parameter import ProductQueue, put_off
from hpctrain.matmul.agarwal import Sharding
from hpctrain.matmul.operands import Gathered
from hpctrain.matmul.sharded_dim import Columns, Rows
from hpctrain.once_differentiable import once_differentiable
from hpctrain.shard import split, split_sizes

if TYPE_CHECKING:
    from hpctrain.layers.algorithm import BoxAlgorithm
    from hpctrain.layers.tokens import Tokens


class BoxProduct:
    """y = x Wᵀ + b; `weight` and `bias` say what a rank holds of W and b.

    It is Agarwal's product yᵀ = W xᵀ, of which x and y are stored transposed: the one in the residual layout has its
    rows sharded over its third axis, the one in the inner layout its columns.
    """

    def __init__(
        self, algorithm: BoxAlgorithm, in_features: int, out_features: int, to_inner: bool, in_unit: int, out_unit: int
    ):
        x, y, z = algorithm.x, algorithm.y, algorithm.z
        self.matmul, self.to_inner, self.overlap = algorithm.matmul, to_inner, algorithm.overlap
        self.split_backward: ProductQueue | None = None  # of a model whose backwards are split
        over_out, over_in = (x, y) if to_inner else (y, x)
        rows = split(out_features, over_out.size, over_out.rank, out_unit)
        columns = split(in_features, over_in.size, over_in.rank, in_unit)
        block = rows.stop - rows.start
        self.over_z = Rows(z, split_sizes(block, z.size))
        out, into = (out_features, out_unit), (in_features, in_unit)
        # The side in the inner layout is sharded over y inside its block over x.
        if to_inner:
            self.inner = Columns(y, split_sizes(block, y.size, out_unit))
            self.weight = algorithm.shard({"inner out": out, "residual in": into})
            self.bias = algorithm.shard({"inner features": out})
        else:
            self.inner = Columns(y, split_sizes(columns.stop - columns.start, y.size, in_unit))
            self.weight = algorithm.shard({"residual out": out, "inner in": into})
            self.bias = algorithm.shard({"features": out})

    def shape_of_input(self, tokens: Tokens) -> tuple[int, int]:
        """Of this rank's part of x."""
        if self.to_inner:
            return tokens.local_rows, self.weight.shape[1]
        return tokens.sequences * tokens.length, self.inner.sizes[self.inner.axis.rank]

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tokens: Tokens
    ) -> torch.Tensor:
        source, target = (tokens.rows, self.inner) if self.to_inner else (self.inner, tokens.rows)
        return _BoxLinear.apply(x, weight, bias, Sharding(self.over_z, source, target, transposed=True), self)

    def weight_gradient(
        self, grad: Gathered, x: Gathered, weight: torch.Tensor, sharding: Sharding
    ) -> torch.Tensor | None:
        """This rank's part of gradᵀ x, or None while its sum over z is put off."""
        mm, sync = self.matmul, grad_sync_of_backward(weight)
        if sync is None:
            return mm.nt(grad, x, sharding)
        if sharding.a.axis.size == 1:
            return mm.nt(grad, x, sharding, out=sync.out())
        if "weight_gradient" in self.overlap and sync.defers and not weight._backward_hooks:
            sync.defer(grad.whole.t(), x.whole, sharding.a)
            return None
        return mm.nt(grad, x, sharding, plus=sync.deferred())

    def late_weight_gradient(
        self, grad: torch.Tensor, x: torch.Tensor, weight: torch.nn.Parameter, sharding: Sharding
    ) -> torch.Tensor | None:
        """The weight gradient that backward left to be computed."""
        c, b = self.matmul.gathered_c(grad, sharding), self.matmul.gathered_b(x, sharding)
        return self.weight_gradient(c, b, weight, sharding)


class _BoxLinear(torch.autograd.Function):
    """Gathers both operands, multiplies, reduce-scatters the result. Keeps only what each rank was given."""

    @staticmethod
    def forward(ctx, x, weight, bias, sharding, product):
        ctx.save_for_backward(x, weight)
        ctx.weight = weight  # where activations are computed once more, what was saved comes back as another object
        ctx.sharding, ctx.product = sharding, product
        # detached, as nobody may change in place what autograd takes for a view
        return product.matmul.nn(weight, x, sharding, bias).detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (x, _), weight = ctx.saved_tensors, ctx.weight
        sharding, product, mm = ctx.sharding, ctx.product, ctx.product.matmul
        needs_x = ctx.needs_input_grad[0]
        grad_bias = grad.sum(0) if ctx.needs_input_grad[2] else None
        late = functools.partial(product.late_weight_gradient, grad, x, weight, sharding)
        if put_off(product.split_backward, weight, late):
            return mm.tn(weight, grad, sharding) if needs_x else None, None, grad_bias, None, None
        grad = mm.gathered_c(grad, sharding)
        if not ctx.needs_input_grad[1]:
            return mm.tn(weight, grad, sharding) if needs_x else None, None, grad_bias, None, None
        begun = needs_x and "input_gradient" in product.overlap and sharding.b.axis.size > 1
        if begun and mm.in_place(sharding.a.axis, weight):
            # x is gathered first: its barrier, after the sum is begun, would be one for the sum to wait for.
            whole = mm.gathered_b(x, sharding)
            grad_x = mm.tn_start(weight, grad, sharding)
        else:
            grad_x = comm.done(mm.tn(weight, grad, sharding) if needs_x else None)
            whole = mm.gathered_b(x, sharding)  # after the sum, which uses the same scratch memory
        grad_weight = product.weight_gradient(grad, whole, weight, sharding)
        return grad_x.wait(), grad_weight, grad_bias, None, None
