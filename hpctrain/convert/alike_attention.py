"""Attention of a model's layers is run to see what it is once for those that are alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hpctrain.convert.head_twins import INDEX, find_heads
from hpctrain.convert.heads import Heads, candidates

_PLAIN = (bool, int, float, str, torch.dtype, type(None))


class Attentions:
    """What was found of the attentions of a model, whose modules do not change meanwhile."""

    def __init__(self) -> None:
        self._found: dict[tuple, Heads | None] = {}

    def heads(self, module: nn.Module) -> Heads | None:
        """None where it is no attention that is divided by heads."""
        if next(candidates(module), None) is None:
            return None
        likeness = _likeness(module, {INDEX})
        if likeness in self._found:
            return self._found[likeness]
        found, reads_index = find_heads(module)
        if not reads_index:
            self._found[likeness] = found
        return found


def _likeness(module: nn.Module, but: set[str]) -> tuple:
    """Equal for modules that differ in the numbers of their weights alone, and in the attributes `but`."""
    tensors = {"_parameters", "_buffers", "_modules"}
    own = {name: _value(value) for name, value in vars(module).items() if name not in tensors | but}
    weights = [(name, None if p is None else (type(p), p.shape, p.dtype)) for name, p in module._parameters.items()]
    buffers = [(name, id(buffer)) for name, buffer in module._buffers.items()]
    children = [(name, child and _likeness(child, set())) for name, child in module._modules.items()]
    return type(module), *map(tuple, (own.items(), weights, buffers, children))


def _value(value: Any) -> tuple:
    if isinstance(value, _PLAIN):
        return type(value), value
    return type(value), id(value) if not isinstance(value, (dict, set, list, tuple)) or value else None
