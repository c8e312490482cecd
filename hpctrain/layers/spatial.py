"""Images: (batch, channels, height, width), batch over z, channels over x, height over y, the width whole.

Each element lives on exactly one rank; all three are balanced splits (`shard.split`) of any sizes, and a rank may hold
no images, no channels or no rows. What the layers need of the whole, the height, they learn from each other.

Source: Gholami, Azad, Jin, Keutzer and Buluç, "Integrated model, batch and domain parallelism in training neural
networks", SPAA 2018.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hpctrain import comm
from hpctrain.comm import Halo
from hpctrain.grid import Axis, Grid
from hpctrain.layers.rules import IMAGES
from hpctrain.shard import split, split_sizes


def image_block(grid: Grid, batch: int, channels: int, height: int, width: int) -> tuple[slice, ...]:
    """The part of whole images that this rank holds: `block = whole[image_block(grid, *whole.shape)]`."""
    dims = {"images": batch, "channels": channels, "height": height, "width": width}
    return IMAGES.layout(dims).slices(grid.sizes, grid.coords)


class Stencil:
    """Windows that slide over images: of `kernel` pixels `dilation` apart, in steps of `stride`.

    Arguments are integers or pairs (height, width), as in torch. The rows of the result are spread over `y` again, so
    that which rows a rank needs follows from the global numbers of the rows it makes.

    Raises:
        ValueError: when one of them is not an integer or a pair, or is out of range.
    """

    def __init__(
        self,
        y: Axis,
        kernel: int | Sequence[int],
        stride: int | Sequence[int],
        padding: int | Sequence[int],
        dilation: int | Sequence[int],
    ):
        self.y = y
        self.kernel = pair("kernel_size", kernel, 1)
        self.stride = pair("stride", stride, 1)
        self.padding = pair("padding", padding, 0)
        self.dilation = pair("dilation", dilation, 1)

    def halo(self, x: torch.Tensor, fill: float = 0.0) -> Halo:
        """The rows each rank of y holds, and those it needs; above and below the images they are `fill`.

        On an axis of size 1 nothing is added: the padding is left to the local operation (see `beside`).

        Raises:
            ValueError: on all ranks of y, when the windows do not fit the images, or their heights are not balanced.
        """
        y = self.y
        self.out(x.shape[3], 1)  # torch's own error would come on some ranks only, after the exchange
        height = whole_height(x, y)
        local = tuple(split(height, y.size, r) for r in range(y.size))
        out_rows = [split(self.out(height, 0), y.size, r) for r in range(y.size)]
        needed = local if y.size == 1 else tuple(self._needed(rows) for rows in out_rows)
        return Halo(y, local, needed, fill=fill)

    def out(self, length: int, dim: int) -> int:
        """Windows that fit along the height (dim 0) or the width (dim 1)."""
        space = length + 2 * self.padding[dim] - self._span(dim)
        if space < 0:
            raise ValueError(
                f"kernel_size {self.kernel} with dilation {self.dilation} and padding {self.padding} does not fit "
                f"images whose {('height', 'width')[dim]} is {length}; use larger images or padding"
            )
        return space // self.stride[dim] + 1

    def out_shape(self, x: torch.Tensor, channels: int) -> tuple[int, ...]:
        """Shape of this rank's result, given its needed rows x."""
        rows = (x.shape[2] + 2 * self.beside[0] - self._span(0)) // self.stride[0] + 1 if x.shape[2] else 0
        return x.shape[0], channels, rows, self.out(x.shape[3], 1)

    @property
    def beside(self) -> tuple[int, int]:
        """Padding that the local operation does: of the rows only where the halo brings none."""
        return self.padding[0] if self.y.size == 1 else 0, self.padding[1]

    def _span(self, dim):
        return self.dilation[dim] * (self.kernel[dim] - 1) + 1

    def _needed(self, out_rows):
        if out_rows.start == out_rows.stop:
            return slice(0, 0)
        first, last = (row * self.stride[0] - self.padding[0] for row in (out_rows.start, out_rows.stop - 1))
        return slice(first, last + self._span(0))


def whole_height(x: torch.Tensor, y: Axis) -> int:
    """Height of the images of which this rank holds the block x. One number from each rank of y.

    Raises:
        ValueError: on all ranks of y, when the rows are not spread as `split` does.
    """
    if y.size == 1:
        return x.shape[2]
    heights = comm.all_gather(torch.tensor([x.shape[2]]), y).tolist()
    expected = split_sizes(sum(heights), y.size)
    if tuple(heights) != expected:
        raise ValueError(
            f"images must be spread over y by image_block: {sum(heights)} rows as {expected}, got {tuple(heights)}"
        )
    return sum(heights)


def pair(option: str, value: int | Sequence[int], least: int) -> tuple[int, int]:
    """
    >>> pair("stride", 2, 1), pair("padding", (0, 3), 0)
    ((2, 2), (0, 3))
    >>> pair("padding", "same", 0)
    Traceback (most recent call last):
    ValueError: padding must be an integer of at least 0, or a pair of them, got 'same'
    """
    both = tuple(value) if isinstance(value, (tuple, list)) else (value, value)
    if len(both) != 2 or not all(type(number) is int and number >= least for number in both):
        raise ValueError(f"{option} must be an integer of at least {least}, or a pair of them, got {value!r}")
    return both
