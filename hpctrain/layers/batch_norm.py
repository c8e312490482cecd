"""Batch normalisation of images whose batch, channels and height are spread over z, x and y (see `layers.spatial`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from hpctrain import comm
from hpctrain.comm import functional
from hpctrain.grid import Axis, Grid
from hpctrain.layers.parameter import Layer, check_sizes, drawn_key, parameter
from hpctrain.layers.rules import IMAGES, shard
from hpctrain.randomness import RngKey


class BatchNorm2d(Layer):
    """torch.nn.BatchNorm2d, with the statistics of the whole batch: over z, y and, unlike torch's, the data axis.

    So a step on many replicas is the step that one rank would do with all their images. Of a batch cut into
    microbatches, each is normalised by its own statistics, as everywhere.

    Args:
        features: channels of the images, spread over x.
        momentum: weight of the newest batch in the running statistics; None for the mean over all batches.

    `weight`, `bias`, `running_mean` and `running_var` hold this rank's channels, those of `shard`.

    Shapes: x and the result are this rank's blocks of (batch, features, height, width). In evaluation nothing moves.
    In training a rank receives 2 (1 - 1/p) (2 features/x + 1) elements forward and 2 (1 - 1/p) · 2 features/x backward,
    for the p ranks of y × z, and again for those of data.

    Raises:
        ValueError: on all ranks, for a grid whose ranks share sequences; in training, when there is but one number a
            channel.
    """

    running_mean: torch.Tensor | None
    running_var: torch.Tensor | None
    num_batches_tracked: torch.Tensor | None

    def __init__(
        self, grid: Grid, features: int, eps: float = 1e-5, momentum: float | None = 0.1, *, key: RngKey | None = None,
        dtype: torch.dtype | None = None, device: torch.device | str | None = None,
    ):  # fmt: skip
        super().__init__()
        grid.check_whole_sequences("BatchNorm2d")
        check_sizes(features=features)
        self.features, self.eps, self.momentum = features, eps, momentum
        self.axes = [axis for axis in (grid.plane("y", "z"), grid.data) if axis.size > 1]
        self.shard = shard(IMAGES, grid, {"channels": features})
        key = drawn_key(grid, key)
        self.weight = parameter(grid, self.shard, key / "weight", None, 1.0, dtype=dtype, device=device)
        self.bias = parameter(grid, self.shard, key / "bias", None, 0.0, dtype=dtype, device=device)
        self.register_buffer("running_mean", torch.zeros_like(self.weight))
        self.register_buffer("running_var", torch.ones_like(self.weight))
        self.register_buffer("num_batches_tracked", torch.tensor(0, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            if x.numel() == 0:
                return x * self.weight[:, None, None] + self.bias[:, None, None]  # torch refuses to have no channels
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        return batch_norm(self, x, self.weight, self.bias, self.axes)

    def extra_repr(self) -> str:
        return f"{self.features}, eps={self.eps}, momentum={self.momentum}"


class Normalising(Protocol):
    """A batch normalisation: torch's, or the one above."""

    eps: float
    momentum: float | None
    running_mean: torch.Tensor | None
    running_var: torch.Tensor | None
    num_batches_tracked: torch.Tensor | None


def batch_norm(
    layer: Normalising,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    axes: Sequence[Axis],
) -> torch.Tensor:
    """Normalise in training by the statistics of all ranks of `axes`, and add these to the layer's running ones.

    Args:
        layer: has `eps`, `momentum`, `running_mean`, `running_var` and `num_batches_tracked`, as torch's.
        x: (batch, channels, ...).
        weight, bias: of the channels; None for none.
        axes: over whose ranks the batch, or what follows the channels, is spread.

    Raises:
        ValueError: on all ranks, when there is but one number a channel.
    """
    with torch.no_grad():
        mean, variance, count = _statistics(x, axes)
        running, spread, batches = layer.running_mean, layer.running_var, layer.num_batches_tracked
        if running is not None and spread is not None and batches is not None:
            batches += 1
            newest = 1 / batches.item() if layer.momentum is None else layer.momentum
            running.lerp_(mean.to(running.dtype), newest)
            spread.lerp_((variance * (count / (count - 1))).to(spread.dtype), newest)
        scale = (variance + layer.eps).rsqrt_()
    return _Normalise.apply(x, weight, bias, mean, scale, count, layer.eps, axes)


def _statistics(x, axes):
    """Mean and variance of each channel over all ranks that hold it, and how many numbers that is. Differentiable.

    Each rank's mean and sum of squared deviations are merged exactly (Chan, Golub and LeVeque 1979): the plain sum
    of squares would cancel. Two all-reduces, whose volume does not grow with the ranks as a gather's would.
    """
    wide = x.to(comm.accumulation_dtype(x.dtype))
    own_count = x.shape[0] * x.shape[2:].numel()
    if wide.numel():
        variance, own_mean = torch.var_mean(wide, _other_dims(x), correction=0)
    else:
        variance, own_mean = wide.sum(_other_dims(x)).expand(2, -1)
    sums = _sum(torch.cat([own_mean * own_count, own_mean.new_tensor([own_count])]), axes)
    count = round(sums[-1].item())
    if count < 2:
        raise ValueError(
            f"batch normalisation needs more than one number a channel in training, got {count} in the batches of all"
            " ranks; give them more samples, or call eval()"
        )
    mean = sums[:-1] / count
    return mean, _sum((variance + (own_mean - mean).square()) * own_count, axes) / count, count


def _sum(sums, axes):
    for axis in axes:
        sums = functional.all_reduce(sums, axis)
    return sums


def _other_dims(x):
    """All dims but that of the channels."""
    return [dim for dim in range(x.dim()) if dim != 1]


class _Normalise(torch.autograd.Function):
    """weight · (x - mean) · scale + bias, where mean and scale are functions of x on all ranks of the axes."""

    @staticmethod
    def forward(ctx, x, weight, bias, mean, scale, count, eps, axes):
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.count, ctx.eps, ctx.axes = count, eps, axes
        y = _normal(x, mean, scale)
        if weight is not None:
            y.mul_(_beside(weight, x)).add_(_beside(bias, x))
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight, mean, scale = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: of the second derivative, they are no constants
            mean, variance, _ = _statistics(x, ctx.axes)
            scale = (variance + ctx.eps).rsqrt()
        normal, others = _normal(x, mean, scale), _other_dims(x)
        along, total = (grad * normal).sum(others), grad.sum(others, dtype=normal.dtype)
        sums = _sum(torch.stack([along, total]), ctx.axes) / ctx.count
        grad_x = torch.addcmul(grad - _beside(sums[1], x), normal, _beside(sums[0], x), value=-1)
        grad_x *= _beside(scale if weight is None else weight * scale, x)
        grads = (None, None) if weight is None else (along.to(weight.dtype), total.to(weight.dtype))
        return grad_x.to(x.dtype), *grads, None, None, None, None, None


def _normal(x, mean, scale):
    return (x - _beside(mean, x)).mul_(_beside(scale, x))


def _beside(channels, x):
    """Of the shape that broadcasts over x."""
    return channels.view(-1, *[1] * (x.dim() - 2))
