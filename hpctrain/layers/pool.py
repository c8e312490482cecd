"""Pooling of images whose batch, channels and height are spread over z, x and y (see `layers.spatial`).

Channels and images do not mix, so that nothing moves over x and z.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from hpctrain.comm import functional
from hpctrain.grid import Grid
from hpctrain.layers.spatial import Stencil, pair, whole_height
from hpctrain.shard import split, split_sizes


class MaxPool2d(torch.nn.Module):
    """torch.nn.MaxPool2d: the largest of each window. `stride` is the kernel's size by default.

    Elements received by a rank: the n · C/x · r · w of its halo forward (as in `Conv2d`), the same backward, and y - 1
    heights. Nothing where the windows of a rank's results lie on its own rows.

    Raises:
        ValueError: as `Conv2d`, and when the padding is more than half of the kernel, or a window holds nothing else.
    """

    def __init__(
        self,
        grid: Grid,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
    ):
        super().__init__()
        self.stencil = _stencil(grid, kernel_size, stride, padding, dilation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        s = self.stencil
        halo = s.halo(x, fill=-math.inf)
        for dim, length in enumerate((halo.local[-1].stop, x.shape[3])):
            if s.padding[dim] and length < s.dilation[dim]:  # where torch's backward writes beside the images
                raise ValueError(
                    f"kernel_size {s.kernel} with dilation {s.dilation} and padding {s.padding} has a window of "
                    f"padding alone in images whose {('height', 'width')[dim]} is {length}; use larger images or less "
                    "dilation"
                )
        rows = functional.halo(x, halo)
        if rows.numel() == 0:
            return _nothing(rows, s)
        return F.max_pool2d(rows, s.kernel, s.stride, s.beside, s.dilation)


class AvgPool2d(torch.nn.Module):
    """torch.nn.AvgPool2d: the mean of each window, zeros of the padding included unless `count_include_pad` is False.

    Elements received and errors as of `MaxPool2d`.
    """

    def __init__(
        self,
        grid: Grid,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        padding: int | Sequence[int] = 0,
        count_include_pad: bool = True,
    ):
        super().__init__()
        self.stencil = _stencil(grid, kernel_size, stride, padding, 1)
        self.count_include_pad = count_include_pad

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        s = self.stencil
        halo = s.halo(x)
        rows = functional.halo(x, halo)
        if rows.numel() == 0:
            return _nothing(rows, s)
        if self.count_include_pad:
            return F.avg_pool2d(rows, s.kernel, s.stride, s.beside)
        height = halo.local[-1].stop
        out_rows = split(s.out(height, 0), s.y.size, s.y.rank)
        inside = torch.outer(_inside(s, height, 0)[out_rows], _inside(s, x.shape[3], 1)).to(x)
        return F.avg_pool2d(rows, s.kernel, s.stride, s.beside, divisor_override=1) / inside


class AdaptiveAvgPool2d(torch.nn.Module):
    """torch.nn.AdaptiveAvgPool2d: means over `output_size` (height, width) windows that cover the image evenly.

    Each rank adds up its own rows' part of every window; a reduce-scatter over y gives each its rows of the result, and
    the first ranks alone where there are fewer rows than ranks. With an output of h' × w' a rank receives
    (1 - 1/y) · n · C/x · h' · w' elements, the same backward, and y - 1 heights.
    """

    def __init__(self, grid: Grid, output_size: int | Sequence[int]):
        super().__init__()
        self.y = grid.tensor.y
        self.height, self.width = pair("output_size", output_size, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.y
        height = whole_height(x, y)
        local = split(height, y.size, y.rank)
        parts = _means(height, self.height)[:, local].to(x) @ x @ _means(x.shape[3], self.width).t().to(x)
        if y.size == 1:
            return parts
        rows = functional.reduce_scatter(parts.permute(2, 0, 1, 3), y, split_sizes(self.height, y.size))
        return rows.permute(1, 2, 0, 3).contiguous()


def _stencil(grid, kernel_size, stride, padding, dilation):
    stencil = Stencil(grid.tensor.y, kernel_size, kernel_size if stride is None else stride, padding, dilation)
    if any(2 * pad > kernel for pad, kernel in zip(stencil.padding, stencil.kernel)):
        raise ValueError(f"padding must be at most half of kernel_size {stencil.kernel}, got {stencil.padding}")
    return stencil


def _nothing(rows, stencil):
    """The result where it has no elements, which torch refuses to compute. It depends on `rows`, so that the adjoint of
    the halo, in which other ranks may wait for this one, runs here too."""
    return rows.sum() * rows.new_zeros(stencil.out_shape(rows, rows.shape[1]))


def _inside(stencil, length, dim):
    """How many pixels of each window along a dim lie within the image."""
    first = torch.arange(stencil.out(length, dim)) * stencil.stride[dim] - stencil.padding[dim]
    return (first + stencil.kernel[dim]).clamp(max=length) - first.clamp(min=0)


def _means(length, windows):
    """Matrix that takes `length` numbers to the means of `windows` ranges of them, which overlap by one at most."""
    matrix = torch.zeros(windows, length, dtype=torch.float64)
    for i in range(windows):
        part = slice(i * length // windows, -(-(i + 1) * length // windows))
        matrix[i, part] = 1 / (part.stop - part.start)
    return matrix
