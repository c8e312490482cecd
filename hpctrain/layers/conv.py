"""Convolution of images whose batch, channels and height are spread over z, x and y (see `layers.spatial`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from hpctrain import comm
from hpctrain.grid import Axis, Grid
from hpctrain.layers.parameter import Layer, check_sizes, drawn_key, parameter, refuse_autocast
from hpctrain.layers.rules import IMAGES, shard
from hpctrain.layers.spatial import Stencil
from hpctrain.matmul.sharded_dim import Rows
from hpctrain.once_differentiable import once_differentiable
from hpctrain.randomness import RngKey
from hpctrain.shard import split, split_sizes


class Conv2d(Layer):
    """torch.nn.Conv2d, padding with zeros, of images spread over the x × y × z box.

    Over x, either the input channels are gathered and each rank makes its own output channels (the weight is then
    spread by rows), or each makes a summand of all outputs from its own input channels (the weight by columns), and
    the sum is scattered. The first moves the input three times, counting backward, the second the output twice: the
    smaller one is taken. Over y, ranks exchange the rows that their windows reach. Within each block over x, the rows
    of the weight are spread over y and z: no two ranks hold the same element. Nothing that was gathered is kept.

    Args:
        grid: the process grid.
        in_channels, out_channels: any numbers.
        kernel_size, stride, padding, dilation: integers or pairs (height, width).
        groups: 1, or a number that lets every rank of x hold whole groups; nothing then moves over x.
        std: standard deviation of the initial weights; torch's default, uniform, has 1 / sqrt(3 fan_in).
        key: names the initial weights; by default drawn from torch's generator.

    Shapes: x is this rank's block of (batch, in_channels, height, width), the result its block of
    (batch, out_channels, height', width'), sizes as in torch.

    Elements received by a rank, forward and backward, with n images a rank, h rows of width w (h' of width w' made), of
    which its windows reach R (with the zeros above and below) and r lie on other ranks, C and C' channels in all, and
    K = C · C' · kernel height · kernel width weights, where sizes divide and neighbours have as many rows to reach:

        over y       3 · n · C/x · r · w                  the input, again in backward, its gradient; and y - 1 heights
        over x       3 (1 - 1/x) · n · C · R · w          gathered: the same three
                  or 2 (1 - 1/x) · n · C' · h' · w'       scattered: the output, its gradient
        over y, z    3 (1 - 1/(yz)) · K/x                 the weight, again in backward, its gradient

    Raises:
        ValueError: when an option is out of range or the groups do not fit the grid; when called, on all ranks of y,
            when the kernel does not fit the images or their rows are not spread as `image_block` does.
    """

    def __init__(
        self, grid: Grid, in_channels: int, out_channels: int, kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1, padding: int | Sequence[int] = 0, dilation: int | Sequence[int] = 1,
        groups: int = 1, bias: bool = True, *, std: float | None = None, key: RngKey | None = None,
        dtype: torch.dtype | None = None, device: torch.device | str | None = None,
    ):  # fmt: skip
        super().__init__()
        check_sizes(in_channels=in_channels, out_channels=out_channels)
        x, plane = grid.tensor.x, grid.plane("y", "z")
        self.stencil = Stencil(grid.tensor.y, kernel_size, stride, padding, dilation)
        _check_groups(groups, in_channels, out_channels, x.size)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.groups = groups  # of this rank
        mine = split(out_channels, x.size, x.rank)
        over, rows = ("own out", "every in"), mine
        self.source = self.target = None
        if groups > 1:
            self.groups = (mine.stop - mine.start) * groups // out_channels
        elif 3 * in_channels * math.prod(self.stencil.stride) < 2 * out_channels:
            self.source = Channels(x, split_sizes(in_channels, x.size))
        else:
            self.target = Channels(x, split_sizes(out_channels, x.size))
            over, rows = ("every out", "own in"), slice(0, out_channels)
        self.over_plane = Rows(plane, split_sizes(rows.stop - rows.start, plane.size))

        kernel = self.stencil.kernel
        fan_in = in_channels // groups * math.prod(kernel)
        std = (3 * fan_in) ** -0.5 if std is None else std
        key = drawn_key(grid, key)
        sizes = out_channels, in_channels // groups, *kernel
        of_weight = shard(IMAGES, grid, dict(zip((*over, "kernel height", "kernel width"), sizes)))
        self.weight = parameter(grid, of_weight, key / "weight", std, dtype=dtype, device=device)
        of_bias = shard(IMAGES, grid, {"channels": out_channels})
        self.bias = parameter(grid, of_bias, key / "bias", None, dtype=dtype, device=device) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        refuse_autocast(x)
        return _Convolution.apply(x, self.weight, self.bias, self, self.stencil.halo(x))

    def gather(self, x: torch.Tensor, halo: comm.Halo) -> torch.Tensor:
        """The rows and channels that the local convolution takes."""
        rows = halo.exchange(x)
        return self.source.gather(rows) if self.source else rows

    def extra_repr(self) -> str:
        s = self.stencil
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={s.kernel}, stride={s.stride}, "
            f"padding={s.padding}, dilation={s.dilation}"
        )


class Channels:
    """The channels of images are spread over `axis`: rank r holds counts[r] of them."""

    __slots__ = ("axis", "counts")

    def __init__(self, axis: Axis, counts: tuple[int, ...]):
        self.axis, self.counts = axis, counts

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """All channels, from every rank's; scratch memory, as in `matmul.sharded_dim`."""
        return comm.workspace(self.axis, part).gather(part.transpose(0, 1), self.counts).transpose(0, 1)

    def scatter(self, summand: torch.Tensor) -> torch.Tensor:
        """This rank's channels of the sum over the axis."""
        if self.axis.size == 1:
            return summand
        swapped = summand.transpose(0, 1)
        workspace = comm.workspace(self.axis, summand)
        buffer = workspace.buffer(summand.numel(), summand)
        buffer.view(swapped.shape).copy_(swapped)
        channel = swapped[:1].numel()
        mine = workspace.reduce(buffer, tuple(count * channel for count in self.counts))
        return mine.view(self.counts[self.axis.rank], *swapped.shape[1:]).transpose(0, 1).contiguous()


class _Convolution(torch.autograd.Function):
    """Gathers the operands, convolves, scatters the result. Keeps only what each rank was given."""

    @staticmethod
    def forward(ctx, x, weight, bias, layer, halo):
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.halo = layer, halo
        y = _convolve(layer, layer.gather(x, halo), layer.over_plane.gather(weight))
        if layer.target:
            y = layer.target.scatter(y)
        return (y if bias is None else y.add_(bias[:, None, None])).detach()  # as in layers.box

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        layer, halo = ctx.layer, ctx.halo
        grad_bias = grad.sum((0, 2, 3)) if ctx.needs_input_grad[2] else None
        if layer.target:
            grad = layer.target.gather(grad)
        rows, whole = layer.gather(x, halo), layer.over_plane.gather(weight)
        grad_x, grad_weight = _convolve_backward(layer, grad, rows, whole, ctx.needs_input_grad[:2])
        if grad_x is not None:
            grad_x = halo.adjoint(layer.source.scatter(grad_x) if layer.source else grad_x)
        if grad_weight is not None:
            grad_weight = _scatter_rows(grad_weight, layer.over_plane)
        return grad_x, grad_weight, grad_bias, None, None


def _convolve(layer, x, weight):
    if x.numel() and weight.numel():
        s = layer.stencil
        return F.conv2d(x, weight, None, s.stride, s.beside, s.dilation, layer.groups)
    return x.new_zeros(layer.stencil.out_shape(x, len(weight)))  # torch refuses some of these sizes


def _convolve_backward(layer, grad, x, weight, wanted):
    if grad.numel() and x.numel() and weight.numel():
        s = layer.stencil
        return torch.ops.aten.convolution_backward(
            grad, x, weight, None, s.stride, s.beside, s.dilation, False, (0, 0), layer.groups, (*wanted, False)
        )[:2]
    return [torch.zeros_like(like) if needed else None for like, needed in zip((x, weight), wanted)]


def _scatter_rows(summand, rows):
    """This rank's rows of the sum over the axis of matrices of any number of dims."""
    return rows.sum(summand.flatten(1)).unflatten(1, summand.shape[1:])


def _check_groups(groups, in_channels, out_channels, ranks):
    if type(groups) is not int or groups < 1 or in_channels % groups or out_channels % groups:
        raise ValueError(
            f"groups must be a positive integer that divides in_channels ({in_channels}) and out_channels "
            f"({out_channels}), got {groups!r}"
        )
    for channels in (in_channels, out_channels):
        if groups > 1 and split_sizes(channels, ranks) != split_sizes(channels, ranks, channels // groups):
            raise ValueError(
                f"groups must leave whole groups on each of the {ranks} ranks of x, got {groups} groups of "
                f"{channels // groups} channels; use a multiple of {ranks} groups, or x = 1"
            )
