"""Layers of a tiny twin of a module, which is run to see what the module computes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class TwinLinear(nn.Linear):
    """In the place of a linear layer; float64. Code outside of it finds weights that are not numbers, so that what
    computes with them as well is not taken for what it is not.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        nn.Module.__init__(self)  # a linear layer's own draws random numbers
        self.in_features = self.out_features = 1
        nan = torch.full((1, 1), torch.nan, dtype=torch.float64)
        self.weight, self.bias = nn.Parameter(nan), nn.Parameter(nan[0].clone())
        self.numbers = weight, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, *self.numbers)


def with_children(module: nn.Module, children: Mapping[str, nn.Module], training: bool, **attributes: Any) -> Any:
    """The module with these children and attributes; nothing that it does reaches the module itself."""
    twin = copy.copy(module)
    modules = {name: child.train(training) for name, child in children.items()}
    twin.__dict__ = {**vars(module), **attributes, "_modules": modules, "training": training}
    return twin
