"""`state_dict()` of optimizers whose weights are divided: its tensors are parts, which files refuse."""

from __future__ import annotations

import sys
from typing import Any

import torch

from hpctrain.convert.gradients import part_of_weight
from hpctrain.convert.refusals import unpicklable
from hpctrain.convert.sharded_parameter import Sharded, StateShard
from hpctrain.rank_gradient import as_tensors


class OptimizerStateShard(StateShard):
    """This rank's part of an optimizer's state; an ordinary tensor again to `optimizer.load_state_dict`."""

    refused = unpicklable(
        "a tensor of optimizer.state_dict() of a parallelized model",
        "save ht.gather_optimizer_state(model, optimizer), and load it by ht.load_optimizer_state",
    )

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        if sys._getframe(1).f_globals.get("__name__") == "torch.optim.optimizer":
            with as_tensors():
                return function(arguments[0].as_subclass(torch.Tensor), *arguments[1:], **(options or {}))
        return super().__torch_function__(function, types, arguments, options)


def mark_saved(optimizer: torch.optim.Optimizer) -> None:
    """Let its `state_dict()` from now on be one of `OptimizerStateShard`s, where weights are divided."""
    if _marked not in optimizer._optimizer_state_dict_post_hooks.values():
        optimizer.register_state_dict_post_hook(_marked)


def _marked(optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    state = dict(saved["state"])
    for group, numbers in zip(optimizer.param_groups, saved["param_groups"]):
        for parameter, number in zip(group["params"], numbers["params"]):
            if isinstance(parameter, Sharded) and number in state:
                state[number] = {key: _part(value, parameter.sharding) for key, value in state[number].items()}
    return {**saved, "state": state}


def _part(value, sharding):
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    with as_tensors():
        return part_of_weight(value, sharding, OptimizerStateShard)
