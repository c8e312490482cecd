"""From images to the matrices that the linear layers take."""

from __future__ import annotations

import torch

from hpctrain.comm import functional
from hpctrain.grid import Grid
from hpctrain.layers.spatial import whole_height
from hpctrain.shard import split, subsplit


class Flatten(torch.nn.Module):
    """Images to a matrix of images × features in the residual layout, the features numbered as torch.nn.Flatten does.

    A `Linear(grid, channels · height · width, …, to="inner")` can follow, with `Tokens.of(grid, batch, 1)`.

    Shapes: x is this rank's block of (batch, channels, height, width). One all-to-all over x and y takes each element
    to the one rank that is to hold it, another brings its gradient back: at most the elements of a block, each; and
    y - 1 heights.

    Raises:
        ValueError: from forward, for blocks of other images than of `channels` channels; on these ranks of x alone, for
            which the others wait.
    """

    def __init__(self, grid: Grid, channels: int):
        super().__init__()
        self.channels = channels
        self.x, self.y, self.plane = grid.tensor.x, grid.tensor.y, grid.plane("x", "y")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x, y = self.x, self.y
        own = split(self.channels, x.size, x.rank)
        if images.shape[1] != own.stop - own.start:
            raise ValueError(
                f"Flatten is of images of {self.channels} channels, {own.stop - own.start} of them on rank {x.rank} of "
                f"x, got {images.shape[1]}; make it of the channels of the images"
            )
        height, width = whole_height(images, y), images.shape[3]
        features = self.channels * height * width
        numbers = torch.arange(features).view(self.channels, height, width)
        batch = slice(0, len(images))
        rows = [subsplit(batch, x.size, r) for r in range(x.size)]
        columns = [split(features, y.size, r) for r in range(y.size)]
        # The features of each rank of the plane, in increasing order: those for one range of columns are together.
        local = [
            numbers[split(self.channels, x.size, i), split(height, y.size, j)].reshape(-1).contiguous()
            for i in range(x.size)
            for j in range(y.size)
        ]

        flat = images.flatten(1)
        mine = local[self.plane.rank]
        parts = [flat[some, _within(mine, range_)].reshape(-1) for some in rows for range_ in columns]
        wanted = columns[y.rank]
        count = rows[x.rank].stop - rows[x.rank].start
        coming = [theirs[_within(theirs, wanted)] for theirs in local]
        counts = tuple(part.numel() for part in parts), tuple(count * len(part) for part in coming)
        arrived = functional.all_to_all(torch.cat(parts), self.plane, *counts).split(counts[1])
        matrix = torch.cat([block.view(count, len(part)) for block, part in zip(arrived, coming)], 1)
        return matrix[:, torch.cat(coming).argsort().to(matrix.device)]


def _within(numbers, part):
    """Where the elements of `part` are in increasing numbers."""
    first, last = torch.searchsorted(numbers, torch.tensor([part.start, part.stop])).tolist()
    return slice(first, last)
