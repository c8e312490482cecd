"""The MLP of a transformer block."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hpctrain.layers.linear import Linear
from hpctrain.layers.tokens import Tokens
from hpctrain.randomness import Key


class MLP(torch.nn.Module):
    """Linear to `hidden` features, GELU (tanh form, as in GPT-2), Linear back; (rows, width) in the residual layout."""

    def __init__(self, grid, width: int, hidden: int, *, std: float | None = None, std_out: float | None = None,
                 key: Key, dtype=None, device=None):  # fmt: skip
        super().__init__()
        made = {"dtype": dtype, "device": device}
        self.up = Linear(grid, width, hidden, to="inner", std=std, key=key / "up", **made)
        self.down = Linear(grid, hidden, width, to="residual", std=std_out, key=key / "down", **made)

    def forward(self, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        return self.down(F.gelu(self.up(x, tokens), approximate="tanh"), tokens)
