"""Embedding: vocabulary spread over x and z, features over y, the result in the residual layout."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from hpctrain import comm
from hpctrain.comm import functional
from hpctrain.grad_sync import grad_sync_of_backward
from hpctrain.layers.parameter import Layer, check_sizes, check_tokens, drawn_key, parameter
from hpctrain.layers.rules import BOX, shard
from hpctrain.layers.tokens import Tokens
from hpctrain.randomness import RngKey
from hpctrain.shard import split, split_sizes

if TYPE_CHECKING:
    from hpctrain.grid import Grid


class Embedding(Layer):
    """A table of `vocabulary` rows of `width` features.

    The table is split as the weight of a `Linear(width, vocabulary, to="inner")` is, so that the two can be tied.

    Shapes: `forward(ids, tokens)` takes all ids of the z block, (sequences × length,) int64, and returns (rows, width)
    in the residual layout. Ids must be from 0 on and below `vocabulary`: the rows of others are NaN where x has several
    ranks; elsewhere torch refuses them.
    """

    def __init__(
        self, grid: Grid, vocabulary: int, width: int, *, std: float = 1.0, key: RngKey | None = None,
        dtype: torch.dtype | None = None, device: torch.device | str | None = None,
    ):  # fmt: skip
        super().__init__()
        check_sizes(vocabulary=vocabulary, width=width)
        self.grid, self.tensor = grid, grid.tensor
        x, z = grid.tensor.x, grid.tensor.z
        self.vocabulary = vocabulary
        self.range = split(vocabulary, x.size, x.rank)
        self.rows_over_z = split_sizes(self.range.stop - self.range.start, z.size)
        as_weight = shard(BOX, grid, {"inner out": vocabulary, "residual in": width})  # as in PLANE
        self.weight = parameter(grid, as_weight, drawn_key(grid, key) / "weight", std, dtype=dtype, device=device)

    def forward(self, ids: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        check_tokens(self, self.grid, tokens)
        if ids.shape != (tokens.sequences * tokens.length,):
            raise ValueError(
                f"Embedding takes the ids of all {tokens.sequences * tokens.length} tokens of the z block as a vector, "
                f"got {tuple(ids.shape)}; flatten them, and make the tokens for these"
            )
        return scatter_rows(self.lookup(ids), tokens)

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows for `ids`, zero for those that lie on other ranks of x: a partial sum over x, (ids, width)."""
        over = None if self.tensor.z.size == 1 else (self.tensor.z, self.rows_over_z)
        return look_up(
            self.weight, ids, self.range, whole=self.tensor.x.size == 1, over=over, vocabulary=self.vocabulary
        )


def look_up(
    weight: torch.Tensor, ids: torch.Tensor, rows: slice, *, whole: bool, over: tuple | None = None,
    padding: int | None = None, vocabulary: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """The rows for `ids` of a table of which this rank holds `rows`, zero for others: (ids, width), differentiable.

    Args:
        ids: (ids,) int64.
        whole: the rank holds all rows.
        over: (axis, counts), where `weight` is but this rank's part of `rows`, and they are gathered.
        padding: an id that gives its row no gradient.
        vocabulary: rows of the whole table, where ids outside of it are not refused before: their rows are NaN.
    """
    if not whole:
        functional.check_followed(ids)
    return _Lookup.apply(weight, ids, rows, whole, over, padding, vocabulary)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, ids, rows, whole, over, padding, vocabulary):
        table = weight if over is None else comm.all_gather(weight, *over)
        ctx.weight, ctx.over, ctx.shape, ctx.dtype = weight, over, table.shape, table.dtype
        counted = None if padding is None else ids != padding
        if whole:
            ctx.save_for_backward(ids, counted)
            return table.index_select(0, ids)
        local = ids - rows.start
        mine = (local >= 0) & (local < len(table))
        ctx.save_for_backward(local, mine if counted is None else mine & counted)
        out = table.new_zeros(len(ids), table.shape[1])
        out[mine] = table[local[mine]]
        if vocabulary is not None:
            out[(ids < 0) | (ids >= vocabulary)] = math.nan
        return out

    @staticmethod
    def backward(ctx, grad):
        (local, counted), grad_sync = ctx.saved_tensors, grad_sync_of_backward(ctx.weight)
        if counted is not None:
            local, grad = local[counted], grad[counted]
        wide = comm.accumulation_dtype(ctx.dtype)  # a token may come often
        table = None
        if grad_sync is not None and ctx.over is None and not torch.is_grad_enabled():
            table = grad_sync.out()
        if table is None or table.dtype != wide:
            table = grad.new_empty(ctx.shape, dtype=wide)
        table = table.zero_().index_add_(0, local, grad.to(wide)).to(ctx.dtype)
        if ctx.over is not None:
            table = functional.reduce_scatter(table, *ctx.over)
        return table, *[None] * 6


def scatter_rows(partial: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """Sum partial lookups over x, each rank keeping its rows of the residual layout."""
    if tokens.rows.axis.size == 1:
        return partial
    return functional.reduce_scatter(partial, tokens.rows.axis, tokens.rows.sizes)
