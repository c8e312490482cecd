"""The layers of a model, whose weights ZeRO-3 gathers one layer at a time, and what is outside of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def layers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The outermost items of lists and dicts of modules, in the order of the model."""
    found: list[torch.nn.Module] = []
    for child in model.children():
        if isinstance(child, (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)):
            found += _items(child)
        else:
            found += layers_of(child)
    return found


def _items(container: torch.nn.Module) -> list[torch.nn.Module]:
    """Those that are called: of an item that is a list or dict itself, its own."""
    return [each for item in container.children() for each in ([item] if is_called(item) else _items(item))]


def is_called(module: torch.nn.Module) -> bool:
    return type(module).forward is not torch.nn.Module.forward


def outside(module: torch.nn.Module, inside: set[torch.nn.Module]) -> Iterator[torch.nn.Parameter]:
    """Of the module and all in it but the layers; a parameter or a part of a layer may be here as well."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if child not in inside:
            yield from outside(child, inside)
