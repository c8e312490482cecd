"""Multi-head and grouped-query self-attention: groups of heads and whole sequences in the inner layout."""

from __future__ import annotations

import torch

from hpctrain.grid import Grid
from hpctrain.layers.algorithm import Algorithm, algorithm_of
from hpctrain.layers.context.attention import Context, attend, tiles_pay
from hpctrain.layers.context.dropout import AttentionDropout
from hpctrain.layers.context.mask import Mask
from hpctrain.layers.context.sharded_kv_cache import ShardedKVCache
from hpctrain.layers.dropout import check_probability
from hpctrain.layers.linear import Linear
from hpctrain.layers.norm import HeadNorm
from hpctrain.layers.parameter import check_sizes, drawn_key
from hpctrain.layers.recompute import recomputed
from hpctrain.layers.rotary import RopeScaling, rotate
from hpctrain.layers.softmax_attention import fused_attention, softmax_attention
from hpctrain.layers.tokens import Tokens
from hpctrain.randomness import RngKey


class Attention(torch.nn.Module):
    """Projections to queries, keys and values, attention of every head within its sequence, projection back.

    Takes and returns (rows, width) in the residual layout. No communication beyond that of the two projections, but
    where ranks share sequences: see `context.attention`.
    Heads / kv_heads query heads share one key and one value head; together they are a group, which stays on one rank.
    The fused weight `qkv` has its rows ordered (group, {queries…, key, value}, feature of the head); with
    kv_heads = heads that is (head, {query, key, value}, feature).

    Args:
        width: features of the residual stream; a multiple of `heads` unless `head_width` is given.
        heads: query heads, any number.
        dropout: of the attention probabilities.
        kv_heads: key and value heads, a divisor of `heads`; by default as many. Ranks hold whole groups, the first
            ones one more.
        head_width: features of a head, by default width / heads.
        causal: attend to no later position.
        window: attend to positions fewer than so many away alone, its own one of them, as Mistral; 0 for all.
        rotary: base of the rotary position embedding of queries and keys, such as 10000.0; None for no embedding.
        rope_scaling: of its frequencies.
        qk_norm: normalise the features of every query and key head before they are turned, with `norm_eps`; see
            `layers.norm.HeadNorm`. Query heads share one weight (`q_norm`), key heads another (`k_norm`).
        algorithm: the matrix product of the projections; see `Linear`.
        recompute: keep only queries, keys and values for backward, not what attention makes of them.
        qkv_bias, proj_bias: whether the two projections have a bias.
        std, std_out: standard deviations of the initial weights of `qkv` and `proj`.

    Source: Ainslie et al., "GQA: training generalized multi-query transformer models from multi-head checkpoints"
    (2023).

    Raises:
        ValueError: when width, heads, kv_heads and head_width do not fit together, or rope_scaling has no rotary, or
            window is negative.
    """

    def __init__(
        self, grid: Grid, width: int, heads: int, dropout: float = 0.0, *, kv_heads: int | None = None,
        head_width: int | None = None, causal: bool = True, window: int = 0, rotary: float | None = None,
        rope_scaling: RopeScaling | None = None, qk_norm: bool = False, norm_eps: float | None = None,
        qkv_bias: bool = True, proj_bias: bool = True, recompute: bool = False, algorithm: str | Algorithm = "agarwal",
        std: float | None = None, std_out: float | None = None, key: RngKey | None = None,
        dtype: torch.dtype | None = None, device: torch.device | str | None = None,
    ):  # fmt: skip
        super().__init__()
        check_sizes(width=width, heads=heads)
        if head_width is None and width % heads:
            raise ValueError(
                f"width must be a multiple of heads where head_width is not given, got width {width} and {heads} heads"
            )
        groups = heads if kv_heads is None else kv_heads
        if groups < 1 or heads % groups:
            raise ValueError(f"kv_heads must be a divisor of heads, got {groups} of {heads} heads")
        self.head_width = width // heads if head_width is None else head_width
        if rotary is not None and self.head_width % 2:
            raise ValueError(f"rotary needs heads of an even width, got head_width {self.head_width}")
        if rotary is None and rope_scaling is not None:
            raise ValueError("rope_scaling needs rotary, the base of the frequencies that it scales")
        if not isinstance(window, int) or window < 0:
            raise ValueError(f"window must be a number of positions, or 0 for all, got {window}")
        self.heads, self.queries = heads, heads // groups  # all heads; query heads of a group
        self.causal, self.window, self.rotary, self.rope_scaling = causal, window, rotary, rope_scaling
        self.p = check_probability(dropout)
        self.recompute = recompute
        self.key = key = drawn_key(grid, key)

        algorithm = algorithm_of(grid, algorithm)
        unit, unit_out = (self.queries + 2) * self.head_width, self.queries * self.head_width
        self.qkv = Linear(
            grid, width, groups * unit, qkv_bias, to="inner", out_unit=unit, std=std, key=key / "qkv",
            algorithm=algorithm, dtype=dtype, device=device,
        )  # fmt: skip
        self.proj = Linear(
            grid, groups * unit_out, width, proj_bias, to="residual", in_unit=unit_out, std=std_out,
            key=key / "proj", algorithm=algorithm, dtype=dtype, device=device,
        )  # fmt: skip
        self.q_norm: HeadNorm | None = None
        self.k_norm: HeadNorm | None = None
        if qk_norm:
            self.q_norm = HeadNorm(grid, self.head_width, norm_eps, key=key / "q_norm", dtype=dtype, device=device)
            self.k_norm = HeadNorm(grid, self.head_width, norm_eps, key=key / "k_norm", dtype=dtype, device=device)
        self.mine = algorithm.inner(groups)
        self.grid = grid

    def forward(self, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        groups = self.mine.stop - self.mine.start
        shape = (len(tokens.inner), tokens.length, groups, self.queries + 2, self.head_width)
        q, k, v = self.qkv(x, tokens).view(shape).split((self.queries, 1, 1), 3)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None:
            q, k = (rotate(part, self.rotary, tokens.spans, self.rope_scaling) for part in (q, k))
        q, k, v = (part.flatten(2, 3).transpose(1, 2) for part in (q, k, v))  # (sequences, heads, length, head_width)
        if tokens.kv_cache is not None:
            if not self.causal:
                raise ValueError("token slices need causal attention: without it, the first needs the last")
            if not isinstance(tokens.kv_cache, ShardedKVCache):
                k, v = tokens.kv_cache.extend(self, k, v)
        attended = recomputed(self.attend, q, k, v, tokens) if self.recompute else self.attend(q, k, v, tokens)
        local_width = groups * self.queries * self.head_width
        return self.proj(attended.transpose(1, 2).reshape(len(tokens.inner) * tokens.length, local_width), tokens)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        """The mixture of values of each query; all, and the result, are (sequences, heads, length, head_width)."""
        dropout = self._dropout(tokens) if self.training and self.p > 0 else None
        if isinstance(tokens.kv_cache, ShardedKVCache):
            return tokens.kv_cache.attend(self, q, k, v, self._context(tokens, None))
        tiled = self.window or tokens.documents or (self.causal and dropout is None and tiles_pay(q, k, v))
        if self.grid.sequence.size > 1 or (tiled and tokens.kv_cache is None):
            return attend(q, k, v, self._context(tokens, dropout))
        if dropout is not None:
            return self._attend_with_dropout(q, k, v, tokens, dropout)
        seen = None if q.shape[2] == k.shape[2] and not self.window else self._seen(q, k)
        return fused_attention(q, k, v, seen, is_causal=self.causal and seen is None, enable_gqa=self.queries > 1)

    def _context(self, tokens: Tokens, dropout: AttentionDropout | None) -> Context:
        masks = tuple(Mask(self.causal, self.window, lengths) for lengths in tokens.inner_documents)
        return Context(
            self.grid.ring, self.grid.ulysses, tokens.over_sequence, masks, self.head_width**-0.5, dropout
        )  # fmt: skip

    def _dropout(self, tokens: Tokens) -> AttentionDropout:
        return AttentionDropout(
            self.key, self.p, tokens.step, tokens.whole, self.heads, tokens.inner, self.mine.start * self.queries
        )

    def _attend_with_dropout(self, q, k, v, tokens, dropout):
        # torch's fused attention draws its own masks, which would depend on the grid.
        everything = slice(0, len(q)), slice(0, q.shape[1]), tokens.spans, (range(k.shape[2]),)
        attended, _ = softmax_attention(
            q, k, v, self._seen(q, k) if self.causal else None, scale=self.head_width**-0.5,
            drop=lambda probabilities: probabilities * dropout.factors(*everything, like=probabilities),
        )  # fmt: skip
        return attended

    def _seen(self, q, k) -> torch.Tensor:
        """Which keys a query may see: those up to its own, of the window; the last key is the last query's."""
        length, keys = q.shape[2], k.shape[2]
        seen = torch.ones(length, keys, dtype=torch.bool, device=q.device).tril_(keys - length)
        return seen.triu_(keys - length + 1 - self.window) if self.window else seen
