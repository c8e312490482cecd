"""Normalisation in the residual layout: features are spread over y, statistics are combined across it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hpctrain import comm
from hpctrain.grid import Axis, Grid
from hpctrain.layers.parameter import Layer, check_shape, check_sizes, check_tokens, drawn_key, parameter
from hpctrain.layers.rules import BOX, WHOLE, shard
from hpctrain.layers.tokens import Tokens
from hpctrain.once_differentiable import once_differentiable
from hpctrain.randomness import RngKey
from hpctrain.shard import Shard, split_sizes


class LayerNorm(Layer):
    """torch.nn.LayerNorm over the features of (rows, width) in the residual layout; `eps` and `bias` as there."""

    def __init__(self, grid: Grid, width: int, eps: float = 1e-5, *, bias: bool = True, key: RngKey | None = None,
                 dtype: torch.dtype | None = None, device: torch.device | str | None = None):  # fmt: skip
        super().__init__()
        self.grid, self.y, self.width, self.eps = grid, grid.tensor.y, width, eps
        over_y, key = _features(grid, width), drawn_key(grid, key)
        self.weight = parameter(grid, over_y, key / "weight", None, 1.0, dtype=dtype, device=device)
        self.bias = parameter(grid, over_y, key / "bias", None, 0.0, dtype=dtype, device=device) if bias else None

    def forward(self, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        check_tokens(self, self.grid, tokens)
        check_shape(self, x, (tokens.local_rows, len(self.weight)))
        if self.y.size == 1:
            return F.layer_norm(x, (self.width,), self.weight, self.bias, self.eps)
        wide = x.to(comm.accumulation_dtype(x.dtype))
        bias = None if self.bias is None else self.bias.to(wide.dtype)
        y = _LayerNormOverY.apply(wide, self.weight.to(wide.dtype), bias, self.y, self.width, self.eps)
        return y.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.width}, eps={self.eps}"


class _RMSWeight(Layer):
    """What the two norms below have in common: `eps`, and one weight for `width` features."""

    def __init__(self, grid: Grid, width: int, eps: float | None = None, *, key: RngKey | None = None,
                 dtype: torch.dtype | None = None, device: torch.device | str | None = None):  # fmt: skip
        super().__init__()
        self.grid, self.y, self.width, self.eps = grid, grid.tensor.y, width, eps
        key = drawn_key(grid, key)
        self.weight = parameter(grid, self._shard(grid, width), key / "weight", None, 1.0, dtype=dtype, device=device)

    def _shard(self, grid: Grid, width: int) -> Shard:
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"{self.width}, eps={self.eps}"


class RMSNorm(_RMSWeight):
    """torch.nn.RMSNorm over the features of (rows, width) in the residual layout; `eps` as there.

    Over y, one sum of a number a row each way. bfloat16 and float16 are normalised in float32.

    Source: Zhang and Sennrich, "Root mean square layer normalization" (2019).
    """

    def _shard(self, grid, width):
        return _features(grid, width)

    def forward(self, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        check_tokens(self, self.grid, tokens)
        check_shape(self, x, (tokens.local_rows, len(self.weight)))
        if self.y.size == 1 and x.is_cuda:
            # One kernel there; torch's on the CPU is composed of many, and takes twice the time of ours.
            return F.rms_norm(x, (self.width,), self.weight, self.eps)
        return _rms_norm(x, self.weight, self.y, self.width, self.eps)


class HeadNorm(_RMSWeight):
    """torch.nn.RMSNorm over the features of every attention head, (…, width), in the inner layout; `eps` as there.

    One weight for all heads, which every rank of the tensor axis holds and uses on heads and tokens of its own. No
    communication. bfloat16 and float16 are normalised in float32.
    """

    def _shard(self, grid, width):
        return shard(WHOLE, grid, {"head": width})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda:
            return F.rms_norm(x, (self.width,), self.weight, self.eps)
        return _rms_norm(x.reshape(-1, self.width), self.weight, None, self.width, self.eps).view(x.shape)


def _rms_norm(x, weight, y, width, eps):
    wide = x.to(comm.accumulation_dtype(x.dtype))
    eps = torch.finfo(wide.dtype).eps if eps is None else eps
    return RMSNormFunction.apply(wide, weight.to(wide.dtype), y, width, eps).to(x.dtype)


def _features(grid, width: int) -> Shard:
    check_sizes(width=width)
    return shard(BOX, grid, {"features": width})  # as in PLANE


class _LayerNormOverY(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, y, width, eps):
        # Each rank's mean and sum of squared deviations, merged exactly (Chan, Golub and LeVeque 1979): the plain
        # sum of squares would cancel.
        mean = x.sum(1).div_(max(x.shape[1], 1))
        centred = x - mean[:, None]
        squares = torch.linalg.vector_norm(centred, dim=1).square_()
        parts = comm.all_gather(torch.stack([mean, squares]), y).view(y.size, 2, len(x))
        means, squares = parts.unbind(1)
        share = torch.tensor(split_sizes(width, y.size), dtype=x.dtype, device=x.device).div_(width)  # of the features
        mean_of_all = share @ means
        variance = squares.sum(0).div_(width).add_(share @ (means - mean_of_all).square_())
        scale = variance.add_(eps).rsqrt_()[:, None]
        normal = centred.add_((mean - mean_of_all)[:, None]).mul_(scale)
        ctx.save_for_backward(normal, scale, weight)
        ctx.y, ctx.width, ctx.has_bias = y, width, bias is not None
        return normal * weight if bias is None else torch.addcmul(bias, normal, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        normal, scale, weight = ctx.saved_tensors
        along = grad * normal
        grad_weight, grad_bias = along.sum(0), grad.sum(0) if ctx.has_bias else None
        sums = comm.all_reduce(torch.stack([grad @ weight, along @ weight]), ctx.y).div_(-ctx.width)[:, :, None]
        grad_x = torch.addcmul(sums[0], grad, weight).addcmul_(normal, sums[1]).mul_(scale)
        return grad_x, grad_weight, grad_bias, None, None, None


class RMSNormFunction(torch.autograd.Function):
    """Of rows whose `width` features are spread over the axis y, or None where each rank has all."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, y: Axis | None, width: int, eps: float):
        squares = torch.linalg.vector_norm(x, dim=1).square_()
        squares = squares if y is None else comm.all_reduce(squares, y)
        scale = squares.div_(width).add_(eps).rsqrt_()
        ctx.save_for_backward(x, scale, weight)
        ctx.y, ctx.width, ctx.eps = y, width, eps
        return (x * scale[:, None]).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        # y = x s w with s = (mean(x²) + eps)^-½, so that dx = s g w - x s³ mean(x g w)
        x, scale, weight = ctx.saved_tensors
        along = grad * x
        grad_weight = scale @ along
        sums = along @ weight
        sums = sums if ctx.y is None else comm.all_reduce(sums, ctx.y)
        pull = sums.mul_(scale.pow(3)).div_(ctx.width)
        grad_x = torch.mul(grad, weight, out=along).mul_(scale[:, None]).addcmul_(x, pull[:, None], value=-1)
        return grad_x, grad_weight, None, None, None
