"""Batch normalisation of images whose batch, channels and height are spread over z, x and y (see `layers.spatial`)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hpctrain import comm
from hpctrain.layers.parameter import drawn_key, parameter
from hpctrain.randomness import Key
from hpctrain.shard import Shard, split


class BatchNorm2d(torch.nn.Module):
    """torch.nn.BatchNorm2d, with the statistics of the whole batch: over z, y and, unlike torch's, the data axis.

    So a step on many replicas is the step that one rank would do with all their images. Of a batch cut into
    microbatches, each is normalised by its own statistics, as everywhere.

    Args:
        features: channels of the images, spread over x.
        momentum: weight of the newest batch in the running statistics; None for the mean over all batches.

    `weight`, `bias`, `running_mean` and `running_var` hold this rank's channels, those of `shard`.

    Shapes: x and the result are this rank's blocks of (batch, features, height, width). In evaluation nothing moves.
    In training a rank receives 2 (1 - 1/p) (2 features/x + 1) words forward and 2 (1 - 1/p) · 2 features/x backward,
    for the p ranks of y × z, and again for those of data.

    Raises:
        ValueError: on all ranks, in training, when there is but one number a channel.
    """

    def __init__(self, grid, features: int, eps: float = 1e-5, momentum: float | None = 0.1, *,
                 key: Key | None = None, dtype=None, device=None):  # fmt: skip
        super().__init__()
        self.features, self.eps, self.momentum = features, eps, momentum
        self.axes = [axis for axis in (grid.plane("y", "z"), grid.data) if axis.size > 1]
        x = grid.tensor.x
        self.shard = Shard((features,), (split(features, x.size, x.rank),), ("y", "z"))
        key = drawn_key(grid, key)
        self.weight = parameter(self.shard, key / "weight", None, 1.0, dtype=dtype, device=device)
        self.bias = parameter(self.shard, key / "bias", None, 0.0, dtype=dtype, device=device)
        self.register_buffer("running_mean", torch.zeros_like(self.weight))
        self.register_buffer("running_var", torch.ones_like(self.weight))
        self.register_buffer("num_batches_tracked", torch.tensor(0, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            if x.numel() == 0:
                return x * self.weight[:, None, None] + self.bias[:, None, None]  # torch refuses to have no channels
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        mean, variance, count = self._statistics(x.detach())
        self._track(mean, variance * (count / (count - 1)))
        scale = (variance + self.eps).rsqrt_()
        return _Normalise.apply(x, self.weight, self.bias, mean, scale, count, self.axes)

    def _statistics(self, x):
        """Mean and variance of each channel over all ranks that hold it, and how many numbers that is.

        Each rank's mean and sum of squared deviations are merged exactly (Chan, Golub and LeVeque 1979): the plain sum
        of squares would cancel. Two all-reduces, whose volume does not grow with the ranks as a gather's would.
        """
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        held = x.shape[0] * x.shape[2:].numel()
        if wide.numel():
            variance, own_mean = torch.var_mean(wide, (0, 2, 3), correction=0)
        else:
            variance, own_mean = wide.new_zeros(2, x.shape[1])
        sums = self._all_reduce(torch.cat([own_mean * held, own_mean.new_tensor([held])]))
        count = round(sums[-1].item())
        if count < 2:
            raise ValueError(f"batch normalisation needs more than one number a channel in training, got {count}")
        mean = sums[:-1] / count
        deviation = self._all_reduce((variance + (own_mean - mean).square_()) * held)
        return mean, deviation / count, count

    def _all_reduce(self, sums):
        for axis in self.axes:
            comm.all_reduce(sums, axis)
        return sums

    @torch.no_grad()
    def _track(self, mean, variance):
        self.num_batches_tracked += 1
        newest = 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), newest)
        self.running_var.lerp_(variance.to(self.running_var.dtype), newest)

    def extra_repr(self):
        return f"{self.features}, eps={self.eps}, momentum={self.momentum}"


class _Normalise(torch.autograd.Function):
    """weight · (x - mean) · scale + bias, where mean and scale are functions of x on all ranks of the axes."""

    @staticmethod
    def forward(ctx, x, weight, bias, mean, scale, count, axes):
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.count, ctx.axes = count, axes
        y = _normal(x, mean, scale).mul_(weight[:, None, None]).add_(bias[:, None, None])
        return y.to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, weight, mean, scale = ctx.saved_tensors
        normal = _normal(x, mean, scale)
        along, total = (grad * normal).sum((0, 2, 3)), grad.sum((0, 2, 3), dtype=normal.dtype)
        sums = torch.stack([along, total])
        for axis in ctx.axes:
            comm.all_reduce(sums, axis)
        sums /= ctx.count
        grad_x = torch.addcmul(grad - sums[1, :, None, None], normal, sums[0, :, None, None], value=-1)
        grad_x *= (weight * scale)[:, None, None]
        return grad_x.to(x.dtype), along.to(weight.dtype), total.to(weight.dtype), None, None, None, None


def _normal(x, mean, scale):
    return (x - mean[:, None, None]).mul_(scale[:, None, None])
