"""Attention over several sets of keys, from that over each of them."""

from __future__ import annotations

import math

import torch

from hpctrain import comm


class Merged:
    """Outputs of attention and their lse, to which those of further keys are added, in float32 at least.

    A query that has seen no key has an output of 0 and an lse of -inf.

    Attributes: `out`, (sequences, heads, length, width) in memory that has the heads of a token side by side, and
    `lse`, (sequences, heads, length).
    """

    def __init__(self, q: torch.Tensor):
        sequences, heads, length, width = q.shape
        wide = comm.accumulation_dtype(q.dtype)
        self.out = q.new_zeros((sequences, length, heads, width), dtype=wide).transpose(1, 2)
        self.lse = q.new_full((sequences, heads, length), -math.inf, dtype=wide)

    def add(self, place: tuple[slice, slice, slice], out: torch.Tensor, lse: torch.Tensor) -> None:
        """Add what the queries at `place` (sequences, heads, rows) have of keys not added yet."""
        before = self.lse[place]
        # a share of e^lse / (e^before + e^lse); 0 where neither has seen a key
        share = torch.sigmoid(lse - before).nan_to_num_(0.0)
        self.out[place].lerp_(out.to(self.out.dtype), share.unsqueeze(-1))
        torch.logaddexp(before, lse, out=before)
