"""Causal multi-head self-attention: heads over (x, y), sequences over z."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from hpctrain.layers.dropout import check_probability, drop
from hpctrain.layers.linear import Linear
from hpctrain.layers.tokens import Tokens
from hpctrain.randomness import Key
from hpctrain.shard import split, subsplit


class Attention(torch.nn.Module):
    """Projections to queries, keys and values, attention of every head to earlier positions, projection back.

    Takes and returns (rows, width) in the residual layout; no communication beyond that of the two projections.
    The fused weight `qkv` has its rows ordered (head, {query, key, value}, feature of the head).

    Args:
        width: features; must be a multiple of `heads`.
        heads: any number; the ranks of (x, y) hold whole heads, the first ones one more.
        dropout: of the attention probabilities.
        std, std_out: standard deviations of the initial weights of `qkv` and `proj`.

    Raises:
        ValueError: when width is not a multiple of heads.
    """

    def __init__(self, grid, width: int, heads: int, dropout: float = 0.0, *, std: float | None = None,
                 std_out: float | None = None, key: Key, dtype=None, device=None):  # fmt: skip
        super().__init__()
        if width % heads:
            raise ValueError(f"width must be a multiple of heads, got width {width} and {heads} heads")
        self.heads, self.head_width, self.p, self.key = heads, width // heads, check_probability(dropout), key
        unit = self.head_width
        made = {"dtype": dtype, "device": device}
        self.qkv = Linear(grid, width, 3 * width, to="inner", out_unit=3 * unit, std=std, key=key / "qkv", **made)
        self.proj = Linear(grid, width, width, to="residual", in_unit=unit, std=std_out, key=key / "proj", **made)
        x, y = grid.tensor.x, grid.tensor.y
        self.mine = subsplit(split(heads, x.size, x.rank), y.size, y.rank)

    def forward(self, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        heads = self.mine.stop - self.mine.start
        packed = self.qkv(x, tokens).view(tokens.sequences, tokens.length, heads, 3, self.head_width)
        q, k, v = packed.permute(3, 0, 2, 1, 4).unbind(0)  # each (sequences, heads, length, head_width)
        if self.training and self.p > 0:
            attended = self._attend_with_dropout(q, k, v, tokens)
        else:
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        joined = attended.transpose(1, 2).reshape(tokens.sequences * tokens.length, heads * self.head_width)
        return self.proj(joined, tokens)

    def _attend_with_dropout(self, q, k, v, tokens):
        # torch's fused attention draws its own masks, which would depend on the grid.
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_width)
        later = torch.ones(tokens.length, tokens.length, dtype=torch.bool, device=q.device).triu(1)
        probabilities = scores.masked_fill(later, -math.inf).softmax(-1)
        return drop(probabilities, self._keep(tokens), self.p) @ v

    def _keep(self, tokens) -> torch.Tensor:
        """Mask of the (sequence, head, query, key) elements this rank holds; they are numbered in that order."""
        area = tokens.length**2
        heads = self.mine.stop - self.mine.start
        masks = [
            self.key.mask((sequence * self.heads + self.mine.start) * area, heads * area, self.p, tokens.step)
            for sequence in range(tokens.first, tokens.first + tokens.sequences)
        ]
        shape = (tokens.sequences, heads, tokens.length, tokens.length)
        return torch.stack(masks).view(shape) if masks else torch.ones(shape, dtype=torch.bool)
