"""Norms: their vectors stay whole, and every rank does the work, a few operations an element.

To divide it, each rank would have to send the others what it made of its part: more time than making it. Vectors are
less than a thousandth of a large model, and to gather them would be one more message for every norm. Larger weights of
norms are divided, and gathered when used.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from hpctrain.convert.boundary import enter
from hpctrain.convert.dropout import FunctionsThatDrop
from hpctrain.convert.gathered_weights import other_weights, split_gathered
from hpctrain.convert.plain import altered, arguments
from hpctrain.convert.plan import Plan, Refused
from hpctrain.convert.sharded_activation import ShardedActivation, whole
from hpctrain.convert.sharding import local
from hpctrain.grid import Axis
from hpctrain.layers.batch_norm import batch_norm


def entered_weights(module: nn.Module, axis: Axis) -> AbstractContextManager[None]:
    """Within it the module's whole weights are for every rank to work on its part with. Gradients of weights that are
    alike, as a norm's weight and bias, are summed in one message."""
    alike: dict[Any, dict[str, torch.Tensor]] = {}
    for name, weight in module._parameters.items():
        if weight is not None and weight.requires_grad and torch.is_grad_enabled():
            alike.setdefault((weight.shape, weight.dtype), {})[name] = weight
    entered: dict[str, torch.Tensor] = {}
    for own in alike.values():
        if len(own) == 1:
            entered |= {name: enter(weight, axis) for name, weight in own.items()}
        else:
            entered |= zip(own, enter(torch.stack([*own.values()]), axis).unbind())
    return other_weights(module, entered)


class WholeByRows(nn.Module):
    """Mixin for a module that treats every token by itself, and keeps its weights whole.

    Attribute: `axis`.
    """

    axis: Axis

    def forward(self, *args: Any, **kwargs: Any):
        x = (*args, *kwargs.values())[0]
        if not isinstance(x, ShardedActivation):
            return super().forward(*args, **kwargs)
        with entered_weights(self, self.axis):
            return x.like(super().forward(x.rows()))


class BatchNormOfReplicas(nn.modules.batchnorm._BatchNorm):
    """Mixin. Statistics are of the whole batch, on all replicas, as one rank would take them.

    Attributes: `data`, the axis of replicas.
    """

    data: Axis

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not (self.training or self.running_mean is None):
            return super().forward(input)
        input = whole(input)
        self._check_input_dim(input)
        with local():
            return batch_norm(self, input, self._parameters["weight"], self._parameters["bias"], [self.data])


def split_norm(plan: Plan, module: nn.Module) -> None:
    """Vectors stay whole, other weights are divided."""
    if any(weight is not None and weight.dim() > 1 for weight in module._parameters.values()):
        split_gathered(plan, module)
        return
    plan.whole(module)
    if plan.shards and (isinstance(module, (nn.LayerNorm, nn.RMSNorm)) or type(module).__name__ == "LlamaRMSNorm"):
        plan.swap_class(module, WholeByRows, axis=plan.axis)


def keep_batch_norm(plan: Plan, module: torch.nn.Module) -> None:
    plan.whole(module)
    unite_statistics(plan, module)


def keep_by_rows(plan: Plan, module: torch.nn.Module) -> bool:
    """Of a module of any type whose weights are all of the features: whether a tiny input shows that it treats every
    token by itself, so that it is given the rows of a rank."""
    weights = list(module._parameters.values())
    width = len(weights[0]) if weights and weights[0] is not None and weights[0].dim() == 1 else 0
    if not width or altered(module) or len(arguments(module)) != 1 or [*module.children(), *module.buffers()]:
        return False
    if any(weight is None or weight.shape != (width,) or plan.is_shared(weight) for weight in weights):
        return False
    chance = torch.Generator().manual_seed(0)
    twin, state = copy.copy(module), torch.get_rng_state()
    numbers = {name: torch.randn(width, generator=chance, dtype=torch.float64) for name in module._parameters}
    twin.__dict__ = {**vars(module), "_parameters": {name: nn.Parameter(x) for name, x in numbers.items()}}
    x, functions = torch.randn(2, 3, width, generator=chance, dtype=torch.float64), FunctionsThatDrop(width)
    with torch.no_grad(), functions:
        try:
            for training in (False, True):
                twin.training = training
                y, rows = twin.forward(x.clone()), [twin.forward(row[None].clone()) for row in x.flatten(0, 1)]
                same = isinstance(y, torch.Tensor) and y.shape == x.shape and all(r.shape == (1, width) for r in rows)
                if not same or not torch.allclose(y.flatten(0, 1), torch.cat(rows), rtol=1e-9, atol=1e-9):
                    return False
        except Exception:  # whatever it does, it is not this
            return False
        finally:
            torch.set_rng_state(state)
    if functions.found:  # whose masks would be of a rank's rows
        return False
    plan.whole(module)
    plan.swap_class(module, WholeByRows, axis=plan.axis)
    return True


def check_statistics(plan: Plan, module: torch.nn.Module) -> None:
    """Of a norm that `parallelize` does not divide: refuse what would take statistics of one replica's batch."""
    batch = isinstance(module, nn.modules.batchnorm._BatchNorm)
    tracked = isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats
    if plan.data.size == 1 or not (batch or tracked) or _is_batch_norm(module):
        return
    remedy = (
        "use torch's own nn.BatchNorm1d, 2d or 3d, whose statistics are then those of all replicas, with what follows "
        "it in modules of their own" if batch else "set track_running_stats=False"
    )  # fmt: skip
    raise Refused(f"its statistics would be those of one of {plan.data.size} replicas; {remedy}, or data=1")


def unite_statistics(plan: Plan, module: torch.nn.Module) -> None:
    """A batch norm takes those of all replicas."""
    if plan.data.size > 1 and _is_batch_norm(module):
        plan.swap_class(module, BatchNormOfReplicas, data=plan.data)


def _is_batch_norm(module) -> bool:
    """Whether its forward is torch's, of a subclass too."""
    own = nn.modules.batchnorm._BatchNorm
    return isinstance(module, own) and type(module).forward is own.forward and not altered(module)
