"""Which dispatch a layer of experts takes: what each of them moves."""

from __future__ import annotations

import math

import torch

from hpctrain import comm
from hpctrain.grid import Axis
from hpctrain.layers.experts.dispatch import AllToAll, Dispatch, Gather, Once
from hpctrain.layers.experts.in_place import InPlace


def choose(axis: Axis, like: torch.Tensor, name: str, top_k: int, experts: int, parts: int = 1) -> type[Dispatch]:
    """The kind of dispatch, alike on all ranks: `name`, or where that is "auto" the one that moves least; but one of
    fewer steps where it moves a twentieth more at most. Each `parts` neighbours have the same experts."""
    path = comm.path_of(axis, like)
    if path is comm.Path.LOCAL:
        return Dispatch
    if name == "auto":
        name = "all_to_all"
        if path is comm.Path.MESSAGES:
            received = elements_received(axis.size, top_k, experts, like.shape[1], parts)
            name = next(each for each, elements in received.items() if elements <= 1.05 * min(received.values()))
    if name == "all_to_all" and path is comm.Path.SHARED_MEMORY:
        return InPlace
    return {"all_to_all": AllToAll, "once": Once, "gather": Gather}[name]


def elements_received(ranks: int, top_k: int, experts: int, features: int, parts: int = 1) -> dict[str, float]:
    """Of each way, those of fewer steps first, for each token of a rank and one of the four moves, where the load is
    even; weights, and the numbers of experts and places, are counted in the same unit. A token goes to all of an
    expert's `parts`, each on another rank.

    >>> {name: round(each) for name, each in elements_received(4, 6, 64, 256).items()}
    {'gather': 790, 'all_to_all': 1156, 'once': 648}
    >>> {name: round(each) for name, each in elements_received(4, 1, 64, 256, 2).items()}
    {'gather': 776, 'all_to_all': 386, 'once': 386}
    """
    local = experts * parts / ranks
    missed = math.prod(max(0.0, experts - local - taken) / (experts - taken) for taken in range(top_k))
    others, weight, pairs = ranks - 1, 1, top_k * parts
    return {
        "gather": others * (features + pairs * (weight + 1 / 4)),
        "all_to_all": pairs * others / ranks * (features + weight),
        "once": others * ((1 - missed) * features + pairs / ranks * (weight + 1 / 4)),
    }
