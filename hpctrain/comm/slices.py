"""Tensors of which each rank holds some rows of dim 2 become tensors of which it holds slices of dim 1, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hpctrain.comm.buffers import accumulation_dtype

Slices = Sequence[Sequence[slice]]  # [tensor][rank]


def rows_of(counts: Sequence[int]) -> list[slice]:
    """Each rank's rows, one after another.

    >>> rows_of((2, 0, 1))
    [slice(0, 2, None), slice(2, 2, None), slice(2, 3, None)]
    """
    starts = [sum(counts[:rank]) for rank in range(len(counts))]
    return [slice(start, start + count) for start, count in zip(starts, counts)]


def length(part: slice) -> int:
    return part.stop - part.start


def sliced_shape(part: torch.Tensor, dim1: int, rows: int) -> tuple[int, ...]:
    return part.shape[0], dim1, rows, part.shape[3]


def summed(pieces: list[torch.Tensor], slices: Sequence[slice]) -> torch.Tensor:
    """One tensor of the ranks' slices of dim 1, in rank order; where they overlap their sum, 16-bit floats in float32.

    >>> ones = torch.ones(1, 2, 1, 1)
    >>> summed([ones, ones], [slice(0, 2), slice(1, 3)]).flatten()
    tensor([1., 2., 1.])
    """
    first = pieces[0]
    whole = max(part.stop for part in slices)
    shape = sliced_shape(first, whole, first.shape[2])
    if sum(map(length, slices)) == whole:
        out = first.new_empty(shape)
        for piece, part in zip(pieces, slices):
            out[:, part] = piece
        return out
    total = first.new_zeros(shape, dtype=accumulation_dtype(first.dtype))
    for piece, part in zip(pieces, slices):
        total[:, part] += piece
    return total.to(first.dtype)
