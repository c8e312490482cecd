"""Sums of rows that belong together, and the sorts that say which."""

from __future__ import annotations

import torch

_RADIX = 1 << 15  # numpy sorts 16-bit integers by radix


def stable_argsort(numbers: torch.Tensor, bound: int) -> torch.Tensor:
    """Places of the numbers, which are from 0 to bound - 1, in order; equal ones as they came. int64.

    >>> stable_argsort(torch.tensor([2, 0, 2, 1]), 3)
    tensor([1, 3, 0, 2])
    """
    if numbers.is_cpu and bound <= _RADIX:
        return torch.from_numpy(numbers.numpy().astype("int16").argsort(kind="stable"))
    return torch.argsort(numbers, stable=True)


class Bags:
    """Row r of a matrix belongs to bag to[r] of `count`; a call gives the sum of each bag's rows, in their order.

    >>> Bags(torch.tensor([2, 0, 2]), 3)(torch.tensor([[1.0], [2.0], [4.0]]))
    tensor([[2.], [0.], [5.]])
    """

    def __init__(self, to: torch.Tensor, count: int):
        sizes = torch.bincount(to, minlength=count)
        self.index = stable_argsort(to, count)
        self.offsets = sizes.cumsum(0) - sizes

    @classmethod
    def at(cls, index: torch.Tensor, offsets: torch.Tensor) -> Bags:
        """Bag b is of the rows index[offsets[b] :], up to the next bag's."""
        bags = cls.__new__(cls)
        bags.index, bags.offsets = index, offsets
        return bags

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if not len(self.offsets) or not len(self.index):
            return rows.new_zeros(len(self.offsets), rows.shape[1])
        return torch.embedding_bag(rows, self.index, self.offsets, False, 0)[0]
