"""Layers of a tiny twin of a module, which is run to see what the module computes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class TwinLinear(nn.Linear):
    """In the place of a linear layer; float64. Code outside of it finds weights that are not numbers, so that what
    computes with them as well is not taken for what it is not.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        super().__init__(1, 1, dtype=torch.float64)
        self.numbers = weight, bias

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, torch.nan)
        nn.init.constant_(self.bias, torch.nan)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, *self.numbers)
