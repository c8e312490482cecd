"""How one dim of a matrix is spread over an axis: gather it, or multiply and reduce-scatter the product."""

from __future__ import annotations

import torch

from hpctrain import comm


class Rows:
    """The rows of a matrix are spread over `axis`: rank r holds `counts[r]` of them."""

    __slots__ = ("axis", "counts")

    def __init__(self, axis, counts: tuple[int, ...]):
        self.axis, self.counts = axis, counts

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """All rows, from every rank's."""
        return comm.all_gather(part, self.axis, self.counts)

    def multiply(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """This rank's rows of the sum over the axis of a @ b."""
        return comm.reduce_scatter(a @ b, self.axis, self.counts)


class Columns:
    """The columns of a matrix are spread over `axis`: rank r holds `widths[r]` of them."""

    __slots__ = ("axis", "widths")

    def __init__(self, axis, widths: tuple[int, ...]):
        self.axis, self.widths = axis, widths

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """All columns, from every rank's."""
        if self.axis.size == 1:
            return part
        rows = len(part)
        sizes = [rows * width for width in self.widths]
        flat = comm.all_gather(part.reshape(-1), self.axis, sizes)
        return torch.cat([block.view(rows, width) for block, width in zip(flat.split(sizes), self.widths)], 1)

    def multiply(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """This rank's columns of the sum over the axis of a @ b."""
        if self.axis.size == 1:
            return a @ b
        rows = len(a)
        sizes = [rows * width for width in self.widths]
        flat = a.new_empty(sum(sizes))
        # Product by product, so that each rank's columns lie together and nothing is packed.
        for block, columns in zip(flat.split(sizes), b.split(self.widths, 1)):
            torch.mm(a, columns, out=block.view(rows, columns.shape[1]))
        return comm.reduce_scatter(flat, self.axis, sizes).view(rows, self.widths[self.axis.rank])
