"""Embedding: vocabulary spread over x and z, features over y, the result in the residual layout."""

from __future__ import annotations

import torch

from hpctrain import comm
from hpctrain.comm import functional
from hpctrain.layers.parameter import drawn_key, parameter
from hpctrain.layers.tokens import Tokens
from hpctrain.randomness import Key
from hpctrain.shard import Shard, split, split_sizes, subsplit


class Embedding(torch.nn.Module):
    """A table of `vocabulary` rows of `width` features.

    The table is split as the weight of a `Linear(width, vocabulary, to="inner")` is, so that the two can be tied.

    Shapes: `forward(ids, tokens)` takes all ids of the z block, (sequences × length,) int64, and returns (rows, width)
    in the residual layout. Ids must be below `vocabulary`.
    """

    def __init__(self, grid, vocabulary: int, width: int, *, std: float = 1.0, key: Key | None = None, dtype=None,
                 device=None):  # fmt: skip
        super().__init__()
        self.tensor = grid.tensor
        x, y, z = grid.tensor.x, grid.tensor.y, grid.tensor.z
        self.range = split(vocabulary, x.size, x.rank)
        self.rows_over_z = split_sizes(self.range.stop - self.range.start, z.size)
        shard = Shard((vocabulary, width), (subsplit(self.range, z.size, z.rank), split(width, y.size, y.rank)))
        self.weight = parameter(shard, drawn_key(grid, key) / "weight", std, dtype=dtype, device=device)

    def forward(self, ids: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        return scatter_rows(self.lookup(ids), tokens)

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows for `ids`, zero for those that lie on other ranks of x: a partial sum over x, (ids, width)."""
        return _Lookup.apply(self.weight, ids, self.tensor.z, self.rows_over_z, self.range, self.tensor.x.size == 1)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, ids, z, rows_over_z, held, whole):
        table = comm.all_gather(weight, z, rows_over_z)
        ctx.weight = weight  # as in layers.box
        ctx.z, ctx.rows_over_z = z, rows_over_z
        if whole:
            ctx.save_for_backward(weight, ids)
            ctx.mine = slice(None)
            return table.index_select(0, ids)
        local = ids - held.start
        ctx.mine = mine = (local >= 0) & (local < len(table))
        ctx.save_for_backward(weight, local[mine])
        out = table.new_zeros(len(ids), table.shape[1])
        out[mine] = table[local[mine]]
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        (_, local), weight = ctx.saved_tensors, ctx.weight
        z = ctx.z
        out = weight.place.take() if z.size == 1 and hasattr(weight, "place") else None
        wide = torch.promote_types(weight.dtype, torch.float32)  # a word may come often
        table = weight.new_empty(sum(ctx.rows_over_z), weight.shape[1], dtype=wide)
        if out is not None and out.dtype == wide:
            table = out
        table.zero_().index_add_(0, local, grad[ctx.mine].to(wide))
        return comm.reduce_scatter(table.to(weight.dtype), z, ctx.rows_over_z), None, None, None, None, None


def scatter_rows(partial: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """Sum partial lookups over x, each rank keeping its rows of the residual layout."""
    return functional.reduce_scatter(partial, tokens.rows.axis, tokens.rows.counts)
