"""The trunk of a model, a list of blocks which a pipeline axis cuts into stages, and the modules beside it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import nn

Trunk = nn.ModuleList | nn.Sequential


class Beside(NamedTuple):
    """A module with weights next to the way to the trunk: `child`, by its name in `parent`; `before`, whether it is
    registered before the trunk."""

    parent: nn.Module
    name: str
    child: nn.Module
    before: bool


def find_trunk(model: nn.Module, path: str | None, ranks: int) -> tuple[str, Trunk]:
    """The trunk and its path, which is `path` unless that is None.

    Raises:
        ValueError: for another module than a list of at least `ranks` blocks, and without a path unless there is one
            such list alone.
    """
    if path is not None:
        found = dict(model.named_modules()).get(path)
        if not isinstance(found, Trunk):
            raise ValueError(f"pipeline must be the path of a ModuleList or Sequential of blocks, got {path!r}")
        if len(found) < ranks:
            raise ValueError(
                f"pipeline={path!r} names {len(found)} blocks, and the grid has {ranks} stages, of one block at least: "
                "name another list, or use a grid of fewer stages"
            )
        return path, found
    candidates = dict(_outermost(model, "", ranks))
    if len(candidates) != 1:
        names = ", ".join(repr(name) for name in candidates) or "none"
        raise ValueError(
            f"a pipeline of {ranks} stages cuts one ModuleList or Sequential of at least as many blocks, and the model "
            f"has {names}; name it by pipeline='path', or use pipeline=1 in the grid"
        )
    return next(iter(candidates.items()))


def _outermost(module: nn.Module, path: str, least: int) -> Iterator[tuple[str, Trunk]]:
    if isinstance(module, Trunk) and len(module) >= least:
        yield path, module
        return
    for name, child in module.named_children():
        yield from _outermost(child, f"{path}.{name}".lstrip("."), least)


def beside_trunk(model: nn.Module, path: str) -> Iterator[Beside]:
    parent = model
    for name in path.split(".") if path else ():
        before = True
        for other, child in parent.named_children():
            if other == name:
                before = False
            elif next(child.parameters(), None) is not None:
                yield Beside(parent, other, child, before)
        parent = parent.get_submodule(name)


def block_costs(trunk: Trunk, beside: Iterable[Beside]) -> list[int]:
    """Of the blocks, by the weights that they multiply with; those beside the trunk count with the first or last."""
    costs = [_cost(block) for block in trunk]
    for each in beside:
        costs[0 if each.before else -1] += _cost(each.child)
    return costs


def _cost(module: nn.Module) -> int:
    tables = {p for each in module.modules() if isinstance(each, nn.Embedding) for p in each.parameters()}
    return 1 + sum(p.numel() for p in module.parameters() if p not in tables)
