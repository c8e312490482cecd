"""How one dim of a matrix is sharded over an axis: gather it, or multiply and reduce-scatter the product.

Gathered matrices are scratch memory, valid until the next call; see `comm.workspace`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hpctrain import comm, gemm
from hpctrain.comm.workspace import Workspace
from hpctrain.grid import Axis


class ShardedDim:
    """Dim `dim` of a matrix is sharded over `axis`: rank r holds `sizes[r]` of its rows or columns."""

    __slots__ = ("axis", "sizes")
    dim: int

    def __init__(self, axis: Axis, sizes: tuple[int, ...]):
        self.axis, self.sizes = axis, sizes

    def gather(self, block: torch.Tensor) -> torch.Tensor:
        """The whole matrix, from every rank's block."""
        raise NotImplementedError

    def reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """This rank's block of the sum of all ranks' matrices, each of which lies in what `summand_buffer` gives."""
        raise NotImplementedError

    def multiply(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        plus: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """This rank's block of the sum over the axis of a @ b, plus `bias`. On an axis of size 1, into `out`.

        `plus` is one more summand of each rank, of the shape of a @ b; for rows, and not on an axis of size 1.
        """
        if self.axis.size == 1:
            return _product(a, b, bias, out)
        workspace = comm.workspace(self.axis, a)
        y = workspace.reduce(*self._partial(workspace, a, b, plus)).view(self._block_shape(a, b))
        return y if bias is None else y.add_(bias)

    def multiply_start(self, a: torch.Tensor, b: torch.Tensor) -> comm.Work[torch.Tensor]:
        """Multiply, and begin to sum; `wait()` returns what `multiply` does."""
        workspace, shape = comm.workspace(self.axis, a, "started"), self._block_shape(a, b)
        return workspace.reduce_start(*self._partial(workspace, a, b)).then(lambda y: y.view(shape))

    def _partial(
        self, workspace: Workspace, a: torch.Tensor, b: torch.Tensor, plus: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, tuple[int, ...]]:
        """a @ b in the workspace, flat, each rank's part in one piece; and how many numbers each rank's part has."""
        raise NotImplementedError

    def _block_shape(self, a: torch.Tensor, b: torch.Tensor) -> list[int]:
        shape = [len(a), b.shape[1]]
        shape[self.dim] = self.sizes[self.axis.rank]
        return shape


class Rows(ShardedDim):
    """The rows of a matrix are sharded over `axis`: rank r holds `sizes[r]` of them."""

    __slots__ = ()
    dim = 0

    def gather(self, block: torch.Tensor) -> torch.Tensor:
        return comm.workspace(self.axis, block).gather(block, self.sizes)

    def reduce(self, partial: torch.Tensor) -> torch.Tensor:
        return comm.reduce_rows(comm.workspace(self.axis, partial), partial, self.sizes)

    def sum(self, matrix: torch.Tensor) -> torch.Tensor:
        """This rank's rows of the sum of all ranks' matrices."""
        return self.reduce(summand_buffer(self.axis, matrix.shape, matrix).copy_(matrix))

    def _partial(self, workspace, a, b, plus=None):
        width = b.shape[1]
        flat = workspace.buffer(len(a) * width, a)
        _product(a, b, plus, flat.view(len(a), width))
        return flat, tuple(count * width for count in self.sizes)


class Columns(ShardedDim):
    """The columns of a matrix are sharded over `axis`: rank r holds `sizes[r]` of them."""

    __slots__ = ()
    dim = 1

    def gather(self, block: torch.Tensor) -> torch.Tensor:
        return comm.workspace(self.axis, block).gather_columns(block, self.sizes)

    def reduce(self, partial: torch.Tensor) -> torch.Tensor:
        return (
            partial if self.axis.size == 1 else comm.workspace(self.axis, partial).reduce_columns(partial, self.sizes)
        )

    def _partial(self, workspace, a, b, plus=None):
        rows = len(a)
        counts = tuple(rows * width for width in self.sizes)
        flat = workspace.buffer(sum(counts), a)
        # Product by product, so that nothing is packed.
        for block, columns in zip(flat.split(counts), b.split(self.sizes, 1)):
            gemm.mm(a, columns, out=block.view(rows, columns.shape[1]))
        return flat, counts


def summand_buffer(axis: Axis, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """A matrix in the axis's workspace to write this rank's summand in."""
    return comm.workspace(axis, like).buffer(shape[0] * shape[1], like).view(shape)


def _product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None) -> torch.Tensor:
    return gemm.mm(a, b, out) if bias is None else gemm.addmm(bias, a, b, out)
