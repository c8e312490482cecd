"""Normalisation in the residual layout: features are spread over y, statistics are combined across it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hpctrain import comm
from hpctrain.layers.parameter import drawn_key, parameter
from hpctrain.layers.tokens import Tokens
from hpctrain.randomness import Key
from hpctrain.shard import Shard, split, split_sizes

_NARROW = (torch.bfloat16, torch.float16)  # normalised in float32


class LayerNorm(torch.nn.Module):
    """torch.nn.LayerNorm over the features of (rows, width) in the residual layout; `eps` and `bias` as there."""

    def __init__(self, grid, width: int, eps: float = 1e-5, *, bias: bool = True, key: Key | None = None,
                 dtype=None, device=None):  # fmt: skip
        super().__init__()
        self.y, self.width, self.eps = grid.tensor.y, width, eps
        shard, key = _features(grid, width), drawn_key(grid, key)
        self.weight = parameter(shard, key / "weight", None, 1.0, dtype=dtype, device=device)
        self.bias = parameter(shard, key / "bias", None, 0.0, dtype=dtype, device=device) if bias else None

    def forward(self, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        if self.y.size == 1:
            return F.layer_norm(x, (self.width,), self.weight, self.bias, self.eps)
        wide = x.float() if x.dtype in _NARROW else x
        bias = None if self.bias is None else self.bias.to(wide.dtype)
        y = _LayerNormOverY.apply(wide, self.weight.to(wide.dtype), bias, self.y, self.width, self.eps)
        return y.to(x.dtype)


class RMSNorm(torch.nn.Module):
    """torch.nn.RMSNorm over the features of (rows, width) in the residual layout; `eps` as there.

    Over y, one sum of a number a row each way. bfloat16 and float16 are normalised in float32.

    Source: Zhang and Sennrich, "Root mean square layer normalization" (2019).
    """

    def __init__(self, grid, width: int, eps: float | None = None, *, key: Key | None = None, dtype=None, device=None):
        super().__init__()
        self.y, self.width, self.eps = grid.tensor.y, width, eps
        key = drawn_key(grid, key)
        self.weight = parameter(_features(grid, width), key / "weight", None, 1.0, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        if self.y.size == 1 and x.is_cuda:
            # One kernel there; torch's on the CPU is composed of many, and takes twice the time of ours.
            return F.rms_norm(x, (self.width,), self.weight, self.eps)
        wide = x.float() if x.dtype in _NARROW else x
        eps = torch.finfo(wide.dtype).eps if self.eps is None else self.eps
        return _RMSNorm.apply(wide, self.weight.to(wide.dtype), self.y, self.width, eps).to(x.dtype)


def _features(grid, width: int) -> Shard:
    return Shard((width,), (split(width, grid.tensor.y.size, grid.tensor.y.rank),), ("x", "z"))


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
        ctx.y, ctx.width, ctx.has_bias = y, width, bias is not None
        return normal * weight if bias is None else torch.addcmul(bias, normal, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        normal, scale, weight = ctx.saved_tensors
        along = grad * normal
        grad_weight, grad_bias = along.sum(0), grad.sum(0) if ctx.has_bias else None
        sums = comm.all_reduce(torch.stack([grad @ weight, along @ weight]), ctx.y) / ctx.width
        grad_x = (grad * weight).sub_(sums[0][:, None]).sub_(normal * sums[1][:, None]).mul_(scale)
        return grad_x, grad_weight, grad_bias, None, None, None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, y, width, eps):
        squares = comm.all_reduce(torch.linalg.vector_norm(x, dim=1).square_(), y)
        scale = squares.div_(width).add_(eps).rsqrt_()
        ctx.save_for_backward(x, scale, weight)
        ctx.y, ctx.width = y, width
        return (x * scale[:, None]).mul_(weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        # y = x s w with s = (mean(x²) + eps)^-½, so that dx = s g w - x s³ mean(x g w)
        x, scale, weight = ctx.saved_tensors
        along = grad * x
        grad_weight = scale @ along
        sums = comm.all_reduce(along @ weight, ctx.y)
        pull = sums.mul_(scale.pow(3)).div_(ctx.width)
        grad_x = torch.mul(grad, weight, out=along).mul_(scale[:, None]).addcmul_(x, pull[:, None], value=-1)
        return grad_x, grad_weight, None, None, None
