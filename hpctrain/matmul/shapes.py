"""Operands as torch.matmul takes them, vectors and stacks of matrices of any array library, as matrices.

Where one operand has leading dims, the product is one of two matrices: the leading dims of A are rows, and those of B
columns. Where both have, they are broadcast, and each pair is a product of its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch


class Shapes(NamedTuple):
    """Of the operands as they were given."""

    a: tuple[int, ...]
    b: tuple[int, ...]

    @property
    def batched(self) -> bool:
        return len(self.a) > 2 and len(self.b) > 2

    @property
    def batch(self) -> tuple[int, ...]:
        """The leading dims of C, where both operands have some.

        Raises:
            ValueError: where they do not broadcast.
        """
        if not self.batched:
            return ()
        try:
            return tuple(torch.broadcast_shapes(self.a[:-2], self.b[:-2]))
        except RuntimeError:
            raise ValueError(
                f"the leading dims {self.a[:-2]} of A, of shape {self.a}, and {self.b[:-2]} of B, of shape {self.b}, "
                "do not broadcast: from the last one on they must be equal, or 1"
            ) from None

    def check(self) -> None:
        """Raise ValueError for what torch.matmul would not multiply."""
        self.sizes()
        _ = self.batch

    def sizes(self) -> tuple[int, int, int]:
        """(m, k, n) of the product, or of each one.

        Raises:
            ValueError: where A has other columns than B rows.
        """
        a, b = self.matrices()
        if a[1] != b[0]:
            raise ValueError(
                f"A of shape {self.a} cannot be multiplied by B of shape {self.b}: the last dim of A is {a[1]}, and B "
                f"needs as many rows, but has {b[0]}"
            )
        return a[0], a[1], b[1]

    def matrices(self) -> tuple[tuple[int, int], tuple[int, int]]:
        if self.batched:
            return (self.a[-2], self.a[-1]), (self.b[-2], self.b[-1])
        rows, columns = torch.Size(self.a[:-1]).numel(), torch.Size((*self.b[:-2], *self.b[1:][-1:])).numel()
        return (rows, self.a[-1]), (self.b[-2:][0], columns)

    def unfold(self, c: torch.Tensor) -> torch.Tensor:
        """C as torch.matmul returns it, of the matrix that it is."""
        n = self.b[-1:] if len(self.b) > 1 else ()
        if len(self.b) < 3:
            return c.view((*self.a[:-1], *n))
        c = c.view((*self.a[:-1], *self.b[:-2], *n))
        return c.movedim(0, -2) if len(self.a) > 1 else c


def fold_a(matrix: torch.Tensor) -> torch.Tensor:
    if matrix.dim() == 1:
        return matrix.unsqueeze(0)
    return matrix.flatten(0, -2) if matrix.dim() > 2 else matrix


def fold_b(matrix: torch.Tensor) -> torch.Tensor:
    if matrix.dim() == 1:
        return matrix.unsqueeze(1)
    return matrix.movedim(-2, 0).flatten(1) if matrix.dim() > 2 else matrix


def as_tensor(name: str, array: Any) -> torch.Tensor:
    """A tensor as it is, and any other array by its protocol, in the same memory where that may be.

    Raises:
        ValueError: naming the operand, where it is no array, sparse, of a type that no tensor has, complex, or a single
            number.
    """
    if isinstance(array, torch.Tensor):
        tensor = array
    else:
        if isinstance(array, np.ndarray) and not (array.flags.writeable and min(array.strides, default=0) >= 0):
            array = array.copy()  # torch has neither memory that is not to be written nor negative strides
        try:
            if hasattr(array, "__dlpack__"):
                tensor = torch.from_dlpack(array)
            elif hasattr(array, "__cuda_array_interface__"):
                tensor = torch.as_tensor(array)
            elif hasattr(array, "__array_interface__"):
                tensor = torch.from_numpy(np.array(array))
            else:
                raise ValueError("it has no array protocol")
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(
                f"{name} must be a tensor, or an array of NumPy, CuPy or another library with __dlpack__, "
                f"__cuda_array_interface__ or __array_interface__, got {_said(array)}: {error}"
            ) from None
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name} must be dense, got a tensor of {tensor.layout}; use .to_dense()")
    if tensor.is_complex():
        raise ValueError(f"{name} must be of real numbers, got {tensor.dtype}; multiply its real and imaginary parts")
    if tensor.dim() == 0:
        raise ValueError(f"{name} must have one dim at least, got a single number; multiply by it with *")
    return tensor


def _said(array: Any) -> str:
    shape, dtype = getattr(array, "shape", None), getattr(array, "dtype", None)
    described = f" of shape {tuple(shape)} and type {dtype}" if shape is not None else ""
    return f"{'an' if type(array).__name__[0] in 'aeiou' else 'a'} {type(array).__name__}{described}"
