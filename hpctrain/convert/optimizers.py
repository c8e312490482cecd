"""Optimizers in a loop of one's own: those that would see a part of what they need are refused before they step."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hpctrain.choices import check_by_elements
from hpctrain.convert.arriving_gradients import Marker, check_summed
from hpctrain.convert.saved_state import mark_saved
from hpctrain.convert.weight_piece import mark_states
from hpctrain.rank_gradient import as_tensors


@functools.cache
def watch_optimizers() -> None:
    """From now on, look at optimizers of torch's kind before their steps, and judge those whose weights are divided;
    complete the gradients of replicas, where that is ours to do.

    A model does not know its optimizers, so that this is the hook that there is.
    """
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _check_loaded(optimizer, parameters):
    """Raise ValueError for a state of whole weights, as another program's: fused kernels would read its beginning."""
    if vars(optimizer).get("_checked_state") is optimizer.state:  # loading makes another
        return
    with as_tensors():
        for parameter in parameters:
            whole = getattr(parameter, "whole_shape", parameter.shape)
            if whole == parameter.shape:
                continue
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and value.dim() and value.shape == whole:
                    raise ValueError(
                        f"the optimizer's {key!r} is of a whole weight, {tuple(whole)}, of which this rank has a part, "
                        f"{tuple(parameter.shape)}: load its state by ht.load_optimizer_state(model, optimizer, state)"
                    )
    vars(optimizer)["_checked_state"] = optimizer.state


def _check_averaged(parameters):
    """Raise ValueError for a weight of no parallelized model beside those of replicas: nobody averages its gradient."""
    alone = [p for p in parameters if p.requires_grad and "shard" not in vars(p)]
    markers = (vars(p).get("unmanaged") for p in parameters)
    if alone and any(isinstance(marker, Marker) and not marker.summed for marker in markers):
        raise ValueError(
            f"the optimizer has a weight of shape {tuple(alone[0].shape)} that is of no parallelized model, so that "
            "its gradient is of one replica's batch; let the model have it before ht.parallelize, or, where you "
            "average its gradient over the replicas, give it to an optimizer of its own"
        )


def _before_step(optimizer, arguments, options):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    check_elementwise(optimizer, parameters)
    _check_loaded(optimizer, parameters)
    mark_saved(optimizer)
    replicas = _replicas(parameters)
    if not replicas:
        by_hand = [p for p in parameters if "strategy" not in vars(p)]  # a strategy's hook looks at the others
        check_summed(by_hand, "optimizer.step()")
        _check_averaged(by_hand)
        mark_states(optimizer)
        return None

    spread = [each for each in replicas if each.divided]
    stepping = _stand_in(optimizer) if spread else optimizer

    def begin():
        for each in replicas:
            each.complete(step=True)
        check_summed(parameters, "optimizer.step()")
        _check_averaged(parameters)
        for each in spread:
            stepping.groups = each.in_pieces(optimizer, stepping.groups)
        mark_states(stepping)

    def wrapped(closure):
        """Its gradients are completed too."""

        def call():
            if spread:
                _end(optimizer, stepping)
            loss = closure()
            begin()
            return loss

        return call

    if not any(map(callable, (*arguments, *options.values()))):
        begin()
    given = tuple(wrapped(each) if callable(each) else each for each in arguments[1:])
    return (stepping, *given), {name: wrapped(each) if callable(each) else each for name, each in options.items()}


def _after_step(optimizer, arguments, options):
    stepped = arguments[0]
    if stepped is not optimizer:
        _end(optimizer, stepped)
        for each in reversed(_replicas(p for group in optimizer.param_groups for p in group["params"])):
            if each.divided:
                each.after_step()


def _stand_in(optimizer):
    """What steps in the place of an optimizer: all that it has is the optimizer's, but for the groups. So these are
    right where a step is broken off."""
    made = object.__new__(_stand_in_type(optimizer.__class__))
    made.__dict__, made.groups = vars(optimizer), optimizer.param_groups
    return made


@functools.cache
def _stand_in_type(kind: type) -> Any:
    own = {"__module__": kind.__module__, "__slots__": ("groups",), "param_groups": property(lambda self: self.groups)}
    return type(kind.__name__, (kind,), own)


def _end(optimizer, stepped) -> None:
    """The optimizer takes over what the stand-in has written into its groups, beside the weights."""
    for group, theirs in zip(optimizer.param_groups, stepped.groups):
        group.update({**theirs, "params": group["params"]})
    stepped.groups = optimizer.param_groups


def _replicas(parameters) -> list:
    """Who averages their gradients, in the order of the parameters."""
    found = (vars(p).get("replicas") for p in parameters)
    return [each for each in dict.fromkeys(found) if each is not None]


def check_elementwise(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.nn.Parameter]) -> None:
    """Raise ValueError where an optimizer mixes the elements of a weight and a rank holds a part of one."""
    if any(_has_part(parameter) for parameter in parameters):
        instead = "AdamW does, and the weights of modules in replicate=[...] of ht.parallelize are whole on every rank"
        check_by_elements(optimizer, instead)


def _has_part(parameter) -> bool:
    shard, replicas = (vars(parameter).get(name) for name in ("shard", "replicas"))
    return shard is not None and (shard.shape != shard.global_shape or (replicas is not None and replicas.divided))
