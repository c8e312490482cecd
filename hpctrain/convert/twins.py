"""Layers of a tiny twin of a module, which is run to see what the module computes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves


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
    twin.__dict__ = {**vars(module), **containers_of(module), **attributes, "_modules": modules, "training": training}
    return twin


class Kept:
    """What twins keep of a call in their attributes, as attention its probabilities, for code outside to look at."""

    def __init__(self) -> None:
        self._of_calls: list[dict[tuple[str, str], list[Any]]] = []

    def call(self, twin: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """What it gives; notes the tensors and floats that it keeps."""
        before = _numbers(twin)
        result = twin(*args, **kwargs)
        after = {key: found for key, found in _numbers(twin).items() if not _same(found, before.get(key, []))}
        self._of_calls.append({key: [torch.as_tensor(x, device="cpu") for x in found] for key, found in after.items()})
        return result

    def are_alike(self) -> bool:
        """Whether all of them kept the same: nothing that is of a part, or that only some of the calls keep."""
        first, *others = self._of_calls
        return all(
            other.keys() == first.keys()
            and all(len(found) == len(first[key]) for key, found in other.items())
            and all(torch.equal(a, b) for key, found in other.items() for a, b in zip(first[key], found))
            for other in others
        )


def containers_of(module: nn.Module) -> dict[str, Any]:
    """Copies of its lists and dicts, and of its buffers, for a twin to change."""
    found = {name: copy.copy(value) for name, value in vars(module).items() if isinstance(value, (list, dict))}
    return {**found, "_buffers": copy.deepcopy(module._buffers)}


def _numbers(twin):
    return {
        (path, name): [x for x in tree_leaves(value) if isinstance(x, (torch.Tensor, float))]
        for path, module in twin.named_modules()
        for name, value in vars(module).items()
    }


def _same(some, others):
    return len(some) == len(others) and all(a is b for a, b in zip(some, others))
