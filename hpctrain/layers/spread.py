"""How one dim of a matrix is spread over an axis: gather it, or multiply and reduce-scatter the product.

Gathered matrices are for passing use; see `comm.workspaces.Workspace`.
"""

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
        if self.axis.size == 1:
            return part
        return comm.workspace(self.axis).gather(part, self.counts)

    def gather_start(self, part: torch.Tensor) -> comm.Work:
        """Begin `gather`; valid until the next but one is started."""
        return comm.workspace(self.axis, "ahead").gather_start(part, self.counts)

    def multiply(self, a: torch.Tensor, b: torch.Tensor, bias=None, out=None, plus=None) -> torch.Tensor:
        """This rank's rows of the sum over the axis of a @ b, plus `bias`. On an axis of size 1, into `out`.

        `plus` is one more summand of each rank, of the shape of a @ b; not on an axis of size 1.
        """
        if self.axis.size == 1:
            return _product(a, b, bias, out)
        workspace = comm.workspace(self.axis)
        y = workspace.reduce(*self._summands(workspace, a, b, plus)).view(self.counts[self.axis.rank], b.shape[1])
        return y if bias is None else y.add_(bias)

    def multiply_start(self, a: torch.Tensor, b: torch.Tensor) -> comm.Work:
        """Multiply, and begin to sum; `wait()` returns the flat result."""
        workspace = comm.workspace(self.axis, "later")
        return workspace.reduce_start(*self._summands(workspace, a, b))

    def sum(self, matrix: torch.Tensor) -> torch.Tensor:
        """This rank's rows of the sum of all ranks' matrices."""
        workspace = comm.workspace(self.axis)
        room = workspace.room(matrix.numel(), matrix).view(matrix.shape)
        return workspace.reduce_rows(room.copy_(matrix), self.counts)

    def _summands(self, workspace, a, b, plus=None):
        width = b.shape[1]
        room = workspace.room(len(a) * width, a)
        _product(a, b, plus, room.view(len(a), width))
        return room, [count * width for count in self.counts]


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
        flat = comm.workspace(self.axis).gather(part.reshape(-1), sizes)
        return torch.cat([block.view(rows, width) for block, width in zip(flat.split(sizes), self.widths)], 1)

    def multiply(self, a: torch.Tensor, b: torch.Tensor, bias=None, out=None) -> torch.Tensor:
        """This rank's columns of the sum over the axis of a @ b, plus `bias`. On an axis of size 1, into `out`."""
        if self.axis.size == 1:
            return _product(a, b, bias, out)
        workspace = comm.workspace(self.axis)
        y = workspace.reduce(*self._summands(workspace, a, b)).view(len(a), self.widths[self.axis.rank])
        return y if bias is None else y.add_(bias)

    def multiply_start(self, a: torch.Tensor, b: torch.Tensor) -> comm.Work:
        """Multiply, and begin to sum; `wait()` returns the flat result."""
        workspace = comm.workspace(self.axis, "later")
        return workspace.reduce_start(*self._summands(workspace, a, b))

    def _summands(self, workspace, a, b):
        rows = len(a)
        sizes = [rows * width for width in self.widths]
        room = workspace.room(sum(sizes), a)
        # Product by product, so that each rank's columns lie together and nothing is packed.
        for block, columns in zip(room.split(sizes), b.split(self.widths, 1)):
            torch.mm(a, columns, out=block.view(rows, columns.shape[1]))
        return room, sizes


def _product(a, b, bias, out):
    return torch.mm(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)
