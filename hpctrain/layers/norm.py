"""Layer normalisation in the residual layout: features are spread over y, statistics are combined across it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hpctrain import comm
from hpctrain.layers.parameter import drawn_key, parameter
from hpctrain.layers.tokens import Tokens
from hpctrain.randomness import Key
from hpctrain.shard import Shard, split, split_sizes


class LayerNorm(torch.nn.Module):
    """torch.nn.LayerNorm over the features of (rows, width) in the residual layout; `eps` as there."""

    def __init__(self, grid, width: int, eps: float = 1e-5, *, key: Key | None = None, dtype=None, device=None):
        super().__init__()
        self.y, self.width, self.eps = grid.tensor.y, width, eps
        key = drawn_key(grid, key)
        shard = Shard((width,), (split(width, self.y.size, self.y.rank),), ("x", "z"))
        self.weight = parameter(shard, key / "weight", None, 1.0, dtype=dtype, device=device)
        self.bias = parameter(shard, key / "bias", None, 0.0, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        if self.y.size == 1:
            return F.layer_norm(x, (self.width,), self.weight, self.bias, self.eps)
        return _LayerNormOverY.apply(x, self.weight, self.bias, self.y, self.width, self.eps)


class _LayerNormOverY(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, y, width, eps):
        # Each rank's mean and sum of squared deviations, merged exactly (Chan, Golub and LeVeque 1979): the plain
        # sum of squares would cancel.
        held = x.shape[1]
        mean = x.sum(1) / max(held, 1)
        deviation = (x - mean[:, None]).square_().sum(1)
        parts = comm.all_gather(torch.stack([mean, deviation]), y).view(y.size, 2, len(x))
        sizes = torch.tensor(split_sizes(width, y.size), dtype=x.dtype, device=x.device)[:, None]
        mean = (parts[:, 0] * sizes).sum(0) / width
        variance = (parts[:, 1] + sizes * (parts[:, 0] - mean).square()).sum(0) / width
        scale = (variance + eps).rsqrt_()[:, None]
        normal = (x - mean[:, None]).mul_(scale)
        ctx.save_for_backward(normal, scale, weight)
        ctx.y, ctx.width = y, width
        return torch.addcmul(bias, normal, weight)

    @staticmethod
    def backward(ctx, grad):
        normal, scale, weight = ctx.saved_tensors
        along = grad * normal
        grad_weight, grad_bias = along.sum(0), grad.sum(0)
        sums = comm.all_reduce(torch.stack([grad @ weight, along @ weight]), ctx.y) / ctx.width
        grad_x = (grad * weight).sub_(sums[0][:, None]).sub_(normal * sums[1][:, None]).mul_(scale)
        return grad_x, grad_weight, grad_bias, None, None, None
