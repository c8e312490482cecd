"""Dropout whose masks depend on (seed, name, step, position in the global batch) and not on the grid."""

from __future__ import annotations

import torch

from hpctrain.grid import Grid
from hpctrain.layers.parameter import check_shape, check_tokens
from hpctrain.layers.tokens import Tokens
from hpctrain.randomness import RngKey, check_key, drop_threshold
from hpctrain.shard import split


class Dropout(torch.nn.Module):
    """Zero elements with probability `p` while training, and scale the others by 1 / (1 - p).

    `p` is rounded to a multiple of 2^-16. Works on (rows, width) in the residual layout.

    Args:
        width: features of the whole activation, of which this rank holds its part over y.
        key: names the masks.
    """

    def __init__(self, grid: Grid, p: float, width: int, *, key: RngKey):
        super().__init__()
        self.grid, self.p, self.width, self.key = grid, check_probability(p), width, check_key(key)
        self.columns = split(width, grid.tensor.y.size, grid.tensor.y.rank)

    def forward(self, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        if not self.training or self.p == 0:
            return x
        check_tokens(self, self.grid, tokens)
        check_shape(self, x, (tokens.local_rows, self.columns.stop - self.columns.start))
        masks = [
            self.key.mask(rows.start * self.width, len(rows) * self.width, self.p, tokens.step)
            for rows in tokens.residual_rows()
        ]
        mask = masks[0] if len(masks) == 1 else torch.cat([torch.empty(0, dtype=torch.bool, device="cpu"), *masks])
        return drop(x, mask.view(len(x), self.width)[:, self.columns], self.p)

    def extra_repr(self) -> str:
        return f"{self.p}, {self.width}"


def check_probability(p: float) -> float:
    if not (0 <= p < 1 and drop_threshold(p) < 2**16):
        raise ValueError(f"dropout must be at least 0 and below 1, in steps of 2^-16, got {p}")
    return p


def drop(x: torch.Tensor, keep: torch.Tensor, p: float) -> torch.Tensor:
    """x where `keep`, scaled by the reciprocal of the true probability of being kept."""
    return x * (keep.to(x.device, x.dtype) / (1 - drop_threshold(p) / 2**16))
