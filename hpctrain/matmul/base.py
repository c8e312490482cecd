"""What all parallel matrix products share: how matrices are cut into blocks, and differentiation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from hpctrain import gemm
from hpctrain.comm import functional
from hpctrain.grid import Axis
from hpctrain.matmul.panels import Scratch
from hpctrain.matmul.shapes import Shapes, as_tensor, fold_a, fold_b
from hpctrain.once_differentiable import once_differentiable
from hpctrain.shard import subsplit

Layouts = tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]


class Matmul:
    """C = A B of an m×k and a k×n matrix on the tensor axes of a grid, every matrix spread over all of their ranks.

        mm = ht.matmul.Agarwal(grid.tensor)       # or Cannon, Summa, TwoHalfD
        a, b = mm.scatter_a(A), mm.scatter_b(B)   # this rank's blocks
        c = mm(a, b)                              # this rank's block of C; differentiable
        C = mm.gather_c(c)                        # the whole C, on every rank

    Operands may be vectors or have leading dims, as those of torch.matmul. Leading dims of A alone are further rows,
    and those of B alone further columns, of one product; where both have some, which are broadcast, each pair is a
    product of its own, and `a, b = mm.scatter(A, B)` cuts them together. Operands may be arrays of NumPy, CuPy and
    others, by __dlpack__ or __cuda_array_interface__; numpy.from_dlpack(C) and its like take results.

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
        if not isinstance(getattr(tensor, "x", None), Axis):  # of another axis it is not there
            raise ValueError(f"tensor must be the tensor axis of a grid, grid.tensor, got {tensor!r}")
        self.tensor, self.x, self.y, self.z = tensor, tensor.x, tensor.y, tensor.z
        self.shape = (self.x.size, self.y.size, self.z.size)
        self._place = (self.x.rank, self.y.rank, self.z.rank)
        self._check_grid(*self.shape)
        self._scratch = Scratch()
        self._a_shape: tuple[int, ...] | None = None  # of the operands as they were given
        self._b_shape: tuple[int, ...] | None = None
        self._together = False  # whether they were cut together
        self._bound: tuple[tuple[torch.Size, torch.Size], Any] | None = None  # of the blocks; what `_sizes` gave

    # Sizes

    def bind(self, m: int, k: int, n: int) -> None:
        """State the sizes of the matrices whose blocks the next products are given.

        `scatter_a` and `scatter_b` do it themselves; this is for blocks made otherwise. Blocks do not tell the sizes of
        the whole, and asking the other ranks at every product would cost more than a small product.
        """
        if min(m, k, n) < 0:
            raise ValueError(f"m, k and n must be at least 0, got {m}, {k} and {n}")
        self._a_shape, self._b_shape, self._together, self._bound = (m, k), (k, n), False, None

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

    def scatter(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's blocks of A and of B, which every rank passes whole. Differentiable; nothing is communicated.

        Where both have leading dims, so have the blocks: they are those of each matrix.

        Raises:
            ValueError: naming shapes, where torch.matmul would not multiply these.
        """
        a, b = as_tensor("A", a), as_tensor("B", b)
        shapes = Shapes(tuple(a.shape), tuple(b.shape))
        shapes.check()
        if not shapes.batched:
            return self.scatter_a(a), self.scatter_b(b)
        (m, k), (_, n) = shapes.matrices()
        self._a_shape, self._b_shape, self._together, self._bound = *shapes, True, None
        return _block(a, self.slices("a", m, k)), _block(b, self.slices("b", k, n))

    def scatter_a(self, matrix: torch.Tensor) -> torch.Tensor:
        """This rank's block of A, which every rank passes whole. Differentiable; nothing is communicated."""
        matrix = as_tensor("A", matrix)
        self._a_shape, self._together, self._bound = tuple(matrix.shape), False, None
        matrix = fold_a(matrix)
        return _block(matrix, self.slices("a", *matrix.shape))

    def scatter_b(self, matrix: torch.Tensor) -> torch.Tensor:
        """This rank's block of B, which every rank passes whole. Differentiable; nothing is communicated."""
        matrix = as_tensor("B", matrix)
        self._b_shape, self._together, self._bound = tuple(matrix.shape), False, None
        matrix = fold_b(matrix)
        return _block(matrix, self.slices("b", *matrix.shape))

    def gather_c(self, c: torch.Tensor) -> torch.Tensor:
        """The whole C on every rank. Its gradient is the sum over the ranks of what they make of it.

        Raises:
            ValueError: where `c` is no block of the product of the sizes that were last scattered or bound.
        """
        c, operands = as_tensor("C", c), self._shapes()
        (m, _, n), batch = operands.sizes(), operands.batch
        shape = (*batch, *(part.stop - part.start for part in self.slices("c", m, n)))
        if c.shape != shape:
            raise ValueError(
                f"C of {m} × {n}, of which rank {self._place} of {self.shape} has a block of shape {shape}, cannot be "
                f"gathered from one of {tuple(c.shape)}: call bind(m, k, n) where the sizes changed since that product"
            )
        x, y, z = map(range, self.shape)
        places = [self.slices("c", m, n, place) for place in itertools.product(x, y, z)]
        shapes = [(*batch, *(part.stop - part.start for part in place)) for place in places]
        counts = tuple(math.prod(shape) for shape in shapes)
        blocks = functional.all_gather(c.reshape(-1), self.tensor, counts).split(counts)
        whole = c.new_empty(*batch, m, n)
        for place, shape, block in zip(places, shapes, blocks):
            whole[(..., *place)] = block.view(shape)
        return whole if operands.batched else operands.unfold(whole)

    # Products

    def __call__(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """This rank's block of C from its blocks of A and B, whose sizes are those last scattered or bound.

        Nothing that was gathered is kept for backward.

        Raises:
            ValueError: for blocks of other sizes or kinds, and within torch.autocast.
        """
        a, b = as_tensor("A", a), as_tensor("B", b)
        gemm.refuse_autocast(a, "ht.matmul computes in the type of its blocks", "give it those of A.bfloat16()")
        shapes, sizes = self._bound or self._bind()
        if (a.shape, b.shape) != shapes:
            raise ValueError(
                f"the blocks have shapes {tuple(a.shape)} and {tuple(b.shape)}, but rank {self._place} of {self.shape} "
                f"holds {tuple(shapes[0])} and {tuple(shapes[1])} of matrices of {self._a_shape} and {self._b_shape}: "
                "call bind(m, k, n) when the sizes change"
            )
        if a.dtype != b.dtype:
            raise ValueError(f"A and B must have one dtype, got {a.dtype} and {b.dtype}; convert one by .to(dtype)")
        if not self._together:
            return _Product.apply(a, b, self, sizes)
        batch = self._shapes().batch
        a, b = (block.expand(*batch, *block.shape[-2:]).flatten(0, -3) for block in (a, b))
        c = _Products.apply(a, b, self, sizes)
        return c.view(*batch, *c.shape[1:])

    def _shapes(self) -> Shapes:
        if self._a_shape is None or self._b_shape is None:
            raise ValueError("the sizes of A and B are not known: make blocks by scatter_a and scatter_b, or call bind")
        return Shapes(self._a_shape, self._b_shape)

    def _bind(self) -> tuple[tuple[torch.Size, torch.Size], Any]:
        operands = self._shapes()
        m, k, n = operands.sizes()
        if operands.batched and not self._together:
            raise ValueError(
                f"A of shape {operands.a} and B of shape {operands.b} both have leading dims, so that each pair of "
                "matrices is a product of its own: make the blocks together, a, b = mm.scatter(A, B)"
            )
        a, b = (
            torch.Size([*leading, *(part.stop - part.start for part in self.slices(matrix, *shape))])
            for matrix, shape, leading in (
                ("a", (m, k), operands.a[:-2] if self._together else ()),
                ("b", (k, n), operands.b[:-2] if self._together else ()),
            )
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


def _block(matrix: torch.Tensor, part: tuple[slice, slice]) -> torch.Tensor:
    """In memory of its own: whole rows would be a view, which is written to on some grids alone."""
    return matrix[(..., *part)].clone(memory_format=torch.contiguous_format)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, mm, sizes):
        ctx.save_for_backward(a, b)
        ctx.mm, ctx.sizes = mm, sizes
        return mm._forward(a, b, sizes).detach()  # no view, which nobody might change in place

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return *ctx.mm._backward(ctx.needs_input_grad[:2], *ctx.saved_tensors, grad, ctx.sizes), None, None


class _Products(torch.autograd.Function):
    """One after the other."""

    @staticmethod
    def forward(ctx, a, b, mm, sizes):
        ctx.save_for_backward(a, b)
        ctx.mm, ctx.sizes = mm, sizes
        m, _, n = mm._shapes().sizes()
        c = a.new_empty(len(a), *(part.stop - part.start for part in mm.slices("c", m, n)))
        for place, (left, right) in enumerate(zip(a, b)):
            c[place] = mm._forward(left.contiguous(), right.contiguous(), sizes)
        return c

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        operands, (*needed, _, _) = ctx.saved_tensors, ctx.needs_input_grad
        grads = [torch.empty_like(operand) if wanted else None for operand, wanted in zip(operands, needed)]
        for place, (a, b, each) in enumerate(zip(*operands, grad)):
            found = ctx.mm._backward(needed, a.contiguous(), b.contiguous(), each.contiguous(), ctx.sizes)
            for whole, part in zip(grads, found):
                if whole is not None:
                    whole[place] = part
        return *grads, None, None
