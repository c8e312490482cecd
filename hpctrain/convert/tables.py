"""Embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from hpctrain.convert.boundary import gather, leave
from hpctrain.convert.sharding import local
from hpctrain.layers.embedding import look_up

if TYPE_CHECKING:
    from hpctrain.convert.plan import Plan


class SplitEmbedding:
    """Mixin for nn.Embedding.

    Attributes:
        by_row: each rank looks up the ids whose rows it holds; otherwise its features of all ids.
        part: this rank's rows or features.
        counts: rows or features by rank.
    """

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with local():
            return self._look_up(ids, self._parameters["weight"])

    def _look_up(self, ids, weight):
        axis = self.axis
        _check(ids, self.num_embeddings)
        if not self.by_row:
            found = F.embedding(ids, weight, self.padding_idx)
            return gather(found, axis, self.counts, ids.dim())
        whole = axis.size == 1
        found = look_up(weight, ids.flatten().long(), self.part, whole=whole, padding=self.padding_idx)
        return leave(found.view(*ids.shape, self.embedding_dim), axis)


def _check(ids, rows):
    """Each rank looks at all ids: a wrong one lies in nobody's rows. On a GPU, looking would wait for the ids."""
    if ids.device.type != "cpu" or ids.numel() == 0:
        return
    low, high = (int(bound) for bound in ids.aminmax())
    if low < 0 or high >= rows:
        wrong = low if low < 0 else high
        raise IndexError(f"nn.Embedding of {rows} rows got the index {wrong}; indices must be from 0 to {rows - 1}")


def split_embedding(plan: Plan, module: torch.nn.Module) -> None:
    """Along the longer dim, as a linear layer of the same weight is, so that the two can share it."""
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, option):
            raise ValueError(f"{option} is not supported")
    rows, width = module.weight.shape
    by_row = rows >= width
    parts = plan.parts(rows if by_row else width)
    part = parts[plan.axis.rank]
    plan.split(module, "weight", 0 if by_row else 1, parts)
    counts = tuple(p.stop - p.start for p in parts)
    plan.swap_class(module, SplitEmbedding, axis=plan.axis, by_row=by_row, part=part, counts=counts)
