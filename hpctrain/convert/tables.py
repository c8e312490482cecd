"""Embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from hpctrain.convert.boundary import enter, gather, leave
from hpctrain.convert.sharding import local
from hpctrain.grid import Axis
from hpctrain.layers.embedding import look_up
from hpctrain.shard import split_sizes

if TYPE_CHECKING:
    from hpctrain.convert.plan import Plan


class SplitEmbedding(nn.Embedding):
    """Mixin for nn.Embedding.

    Attributes:
        by_row: each rank looks up the ids whose rows it holds; otherwise its features of all ids.
        part: this rank's rows or features.
        counts: rows or features by rank.
    """

    axis: Axis
    by_row: bool
    part: slice
    counts: tuple[int, ...]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with local():
            return self._look_up(input, self._parameters["weight"])

    def _look_up(self, ids, weight):
        axis = self.axis
        _check(ids, self.num_embeddings)
        if not self.by_row:
            found = F.embedding(ids, weight, self.padding_idx)
            return gather(found, axis, self.counts, ids.dim())
        whole = axis.size == 1
        found = look_up(weight, ids.flatten().long(), self.part, whole=whole, padding=self.padding_idx)
        return leave(found.view(*ids.shape, self.embedding_dim), axis)


class SplitEmbeddingBag(nn.EmbeddingBag):
    """Mixin for nn.EmbeddingBag: each rank has its features of all rows.

    Attributes: `axis`; `counts`, of features by rank.
    """

    axis: Axis
    counts: tuple[int, ...]

    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        with local():
            weight, local_features = self.weight, self.counts[self.axis.rank]
            if not local_features:  # of which torch's sums make no bags
                weight = F.pad(weight, (0, 1))
            scale = per_sample_weights
            found = F.embedding_bag(
                input, weight, offsets, mode=self.mode, include_last_offset=self.include_last_offset,
                per_sample_weights=None if scale is None else enter(scale, self.axis), padding_idx=self.padding_idx,
            )  # fmt: skip
            return gather(found[:, :local_features], self.axis, self.counts, 1)


def _check(ids, rows):
    """Each rank looks at all ids: a wrong one lies in nobody's rows. On a GPU nobody waits for the answer, and the job
    ends as by torch's own kernel; in an exported graph there are no ids, and in torch.vmap none that can be read."""
    if ids.device.type not in ("cpu", "cuda") or ids.numel() == 0 or torch.compiler.is_compiling():
        return
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return
    if ids.is_cuda:
        torch._assert_async(((ids >= 0) & (ids < rows)).all(), f"indices must be from 0 to {rows - 1}")
        return
    low, high = (int(bound) for bound in ids.aminmax())
    if low < 0 or high >= rows:
        wrong = low if low < 0 else high
        raise IndexError(f"nn.Embedding of {rows} rows got the index {wrong}; indices must be from 0 to {rows - 1}")


def split_embedding(plan: Plan, module: nn.Embedding) -> None:
    """Along the longer dim, as a linear layer of the same weight is, so that the two can share it."""
    _check_options(module)
    rows, width = module.weight.shape
    by_row = rows >= width
    parts = plan.parts(rows if by_row else width)
    part = parts[plan.axis.rank]
    plan.split(module, "weight", 0 if by_row else 1, parts)
    counts = tuple(p.stop - p.start for p in parts)
    plan.swap_class(module, SplitEmbedding, axis=plan.axis, by_row=by_row, part=part, counts=counts)


def split_embedding_bag(plan: Plan, module: nn.EmbeddingBag) -> None:
    """By features: a bag is of any rows."""
    _check_options(module)
    plan.split(module, "weight", 1)
    counts = split_sizes(module.embedding_dim, plan.axis.size)
    plan.swap_class(module, SplitEmbeddingBag, axis=plan.axis, counts=counts)


def _check_options(module):
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, option):
            raise ValueError(f"{option} is not supported")
