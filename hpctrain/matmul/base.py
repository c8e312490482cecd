"""What all parallel matrix products share: how matrices are cut into blocks, and differentiation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from hpctrain.comm import functional
from hpctrain.grid import Axis
from hpctrain.matmul.panels import Scratch
from hpctrain.shard import subsplit

Layouts = tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]


class Matmul:
    """C = A B of an m×k and a k×n matrix on the tensor axes of a grid, every matrix spread over all of their ranks.

        mm = ht.matmul.Agarwal(grid.tensor)       # or Cannon, Summa, TwoHalfD
        a, b = mm.scatter_a(A), mm.scatter_b(B)   # this rank's blocks
        c = mm(a, b)                              # this rank's block of C; differentiable
        C = mm.gather_c(c)                        # the whole C, on every rank

    Any sizes: dims are cut in balanced parts, the first ones longer, the last ones empty where there are too few. Sums
    over ranks of 16-bit floats are taken in float32. Products, gradients included, are collective over the axes: every
    rank's blocks require gradients, or none's.

    Args:
        tensor: `grid.tensor`.

    Raises:
        ValueError: on every rank, when the algorithm does not work on such a grid.
    """

    # for A, B and C: the axes, outermost first, that the rows are cut over, and the columns
    layouts: Layouts

    def __init__(self, tensor: Axis):
        self.tensor, self.x, self.y, self.z = tensor, tensor.x, tensor.y, tensor.z
        self.shape = (self.x.size, self.y.size, self.z.size)
        self._place = (self.x.rank, self.y.rank, self.z.rank)
        self._check_grid(*self.shape)
        self._scratch = Scratch()
        self._a_shape: tuple[int, int] | None = None
        self._b_shape: tuple[int, int] | None = None
        self._bound: tuple[tuple[torch.Size, torch.Size], Any] | None = None  # of the blocks; what `_sizes` gave

    # Sizes

    def bind(self, m: int, k: int, n: int) -> None:
        """State the sizes of the matrices whose blocks the next products are given.

        `scatter_a` and `scatter_b` do it themselves; this is for blocks made otherwise. Blocks do not tell the sizes of
        the whole, and asking the other ranks at every product would cost more than a small product.
        """
        self._a_shape, self._b_shape, self._bound = (m, k), (k, n), None

    def slices(
        self, matrix: str, rows: int, columns: int, place: tuple[int, int, int] | None = None
    ) -> tuple[slice, slice]:
        """Which rows and columns of the whole "a", "b" or "c" the rank at (x, y, z), this one by default, holds."""
        place = self._place if place is None else place
        over_rows, over_columns = self.layouts["abc".index(matrix)]
        return self._part(rows, over_rows, place), self._part(columns, over_columns, place)

    def _part(self, length: int, axes: tuple[str, ...], place: tuple[int, int, int]) -> slice:
        part = slice(0, length)
        for axis in axes:
            index = "xyz".index(axis)
            part = subsplit(part, self.shape[index], place[index])
        return part

    def scatter_a(self, matrix: torch.Tensor) -> torch.Tensor:
        """This rank's block of A, which every rank passes whole. Differentiable; nothing is communicated."""
        rows, columns = matrix.shape
        self._a_shape, self._bound = (rows, columns), None
        return matrix[self.slices("a", rows, columns)].contiguous()

    def scatter_b(self, matrix: torch.Tensor) -> torch.Tensor:
        """This rank's block of B, which every rank passes whole. Differentiable; nothing is communicated."""
        rows, columns = matrix.shape
        self._b_shape, self._bound = (rows, columns), None
        return matrix[self.slices("b", rows, columns)].contiguous()

    def gather_c(self, c: torch.Tensor) -> torch.Tensor:
        """The whole C on every rank. Its gradient is the sum over the ranks of what they make of it."""
        (m, _), (_, n) = self._shapes()
        x, y, z = map(range, self.shape)
        places = [self.slices("c", m, n, place) for place in itertools.product(x, y, z)]
        shapes = [tuple(part.stop - part.start for part in place) for place in places]
        counts = tuple(rows * columns for rows, columns in shapes)
        blocks = functional.all_gather(c.reshape(-1), self.tensor, counts).split(counts)
        whole = c.new_empty(m, n)
        for place, shape, block in zip(places, shapes, blocks):
            whole[place] = block.view(shape)
        return whole

    # Products

    def __call__(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """This rank's block of C from its blocks of A and B, whose sizes are those last scattered or bound.

        Nothing that was gathered is kept for backward.
        """
        shapes, sizes = self._bound or self._bind()
        if (a.shape, b.shape) != shapes or a.dtype != b.dtype:
            raise ValueError(
                f"the blocks have shapes {tuple(a.shape)} and {tuple(b.shape)} and dtypes {a.dtype} and {b.dtype}, but "
                f"rank {self._place} of {self.shape} holds {shapes[0]} and {shapes[1]}, of one dtype, of matrices of "
                f"{self._a_shape} and {self._b_shape}: call bind(m, k, n) when the sizes change"
            )
        return _Product.apply(a, b, self, sizes)

    def _shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        if self._a_shape is None or self._b_shape is None:
            raise ValueError("the sizes of A and B are not known: make blocks by scatter_a and scatter_b, or call bind")
        return self._a_shape, self._b_shape

    def _bind(self) -> tuple[tuple[torch.Size, torch.Size], Any]:
        (m, k), (rows, n) = self._shapes()
        if k != rows:
            raise ValueError(f"A of {m} × {k} cannot be multiplied by B of {rows} × {n}")
        a, b = (
            torch.Size([part.stop - part.start for part in self.slices(matrix, *shape)])
            for matrix, shape in (("a", (m, k)), ("b", (k, n)))
        )
        self._bound = (a, b), self._sizes(m, k, n)
        return self._bound

    # Of each algorithm

    def volume(self, m: int, k: int, n: int) -> float:
        """Elements that each rank receives in a product where the sizes divide evenly; on average where they do not."""
        raise NotImplementedError

    def volume_backward(self, m: int, k: int, n: int) -> float:
        """Elements that each rank receives for both gradients, likewise."""
        raise NotImplementedError

    def _check_grid(self, x: int, y: int, z: int) -> None:
        raise NotImplementedError

    def _sizes(self, m: int, k: int, n: int) -> Any:
        """What the products need to know of the sizes."""
        raise NotImplementedError

    def _forward(self, a: torch.Tensor, b: torch.Tensor, sizes: Any) -> torch.Tensor:
        raise NotImplementedError

    def _backward(
        self, needed: Sequence[bool], a: torch.Tensor, b: torch.Tensor, grad: torch.Tensor, sizes: Any
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The gradients of a and b; None for one that is not needed."""
        raise NotImplementedError

    def _refuse(self, needs: str) -> ValueError:
        x, y, z = self.shape
        return ValueError(f"{type(self).__name__} needs a tensor grid of {needs}, got x={x}, y={y}, z={z}")


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, mm, sizes):
        ctx.save_for_backward(a, b)
        ctx.mm, ctx.sizes = mm, sizes
        return mm._forward(a, b, sizes)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return *ctx.mm._backward(ctx.needs_input_grad[:2], *ctx.saved_tensors, grad, ctx.sizes), None, None
