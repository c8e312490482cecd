"""Products of rows that are sorted by expert with the weights of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch


def products(rows: torch.Tensor, weight: torch.Tensor, counts: Sequence[int], transposed: bool) -> torch.Tensor:
    """Of the next counts[e] rows with weight[e] (out, in), or with its transpose for rows of `in` elements."""
    out = rows.new_empty(len(rows), weight.shape[1 if transposed else 2])
    for expert, part in _parts(counts):
        matrix = weight[expert].t() if transposed else weight[expert]
        torch.mm(rows[part], matrix, out=out[part])
    return out


def weight_gradients(grad: torch.Tensor, rows: torch.Tensor, counts: Sequence[int], out: torch.Tensor) -> torch.Tensor:
    """Of each expert gradᵀ rows, (out, in), written to `out`: 0 where there are no rows."""
    for expert, part in _parts(counts):
        torch.mm(grad[part].t(), rows[part], out=out[expert])
    return out


def _parts(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    start = 0
    for expert, count in enumerate(counts):
        yield expert, slice(start, start + count)
        start += count
