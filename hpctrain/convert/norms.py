"""Norms: weights divided, gathered when used; the work, a few operations an element, is done on every rank.

To divide it, each rank would have to send the others what it made of its part: more time than making it.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from hpctrain.comm import functional
from hpctrain.convert.boundary import enter, gather
from hpctrain.convert.dropout import FunctionsThatDrop
from hpctrain.convert.plain import altered, arguments
from hpctrain.convert.plan import Plan, Refused
from hpctrain.convert.sharded_activation import ShardedActivation, whole
from hpctrain.convert.sharding import local
from hpctrain.grid import Axis
from hpctrain.layers.batch_norm import batch_norm
from hpctrain.shard import split_sizes


@contextlib.contextmanager
def other_weights(module: nn.Module, weights: dict[str, torch.Tensor]) -> Iterator[None]:
    """Within it the module has these in the place of its own weights of the same names."""
    parameters: dict[str, Any] = module._parameters  # tensors, for a while
    own = dict(parameters)
    try:
        parameters.update(weights)
        yield
    finally:
        parameters.update(own)


def entered_weights(module: nn.Module, axis: Axis) -> AbstractContextManager[None]:
    """Within it the module's whole weights are for every rank to work on its part with."""
    own = module._parameters.items()
    return other_weights(module, {name: enter(weight, axis) for name, weight in own if weight is not None})


class Gathered(nn.Module):
    """Mixin for a module that is given its whole weights for the time of its forward.

    Attributes:
        axis: the ranks that hold the weights.
        divided: {name of a parameter: (dim, counts by rank)}.
    """

    axis: Axis
    divided: dict[str, tuple[int, tuple[int, ...]]]

    def forward(self, *args: Any, **kwargs: Any):
        return self._with_weights(gather, *args, **kwargs)

    def _with_weights(self, gather, *args, **kwargs):
        with other_weights(self, self._gathered(gather)):
            return super().forward(*args, **kwargs)

    def _gathered(self, gather) -> dict[str, torch.Tensor]:
        """Vectors that are divided alike, as a norm's weight and bias, in one message."""
        alike: dict[Any, list[str]] = {}
        for name, divided in self.divided.items():
            part: Any = self._parameters[name]
            key = (divided, part.dtype, part.requires_grad) if part.dim() == 1 else name
            alike.setdefault(key, []).append(name)
        found = {}
        with local():
            for names in alike.values():
                dim, counts = self.divided[names[0]]
                parts: list[Any] = [self._parameters[name] for name in names]
                if len(parts) == 1:
                    found[names[0]] = gather(parts[0], self.axis, counts, dim)
                else:
                    found |= zip(names, gather(torch.stack(parts, 1), self.axis, counts, dim).t().contiguous())
        return found


class GatheredByRows(Gathered):
    """Mixin for a norm of every token by itself: of rows, the ranks' gradients of the weights are summed."""

    def forward(self, *args: Any, **kwargs: Any):
        x = (*args, *kwargs.values())[0]
        if not isinstance(x, ShardedActivation):
            return super().forward(*args, **kwargs)
        return x.like(self._with_weights(_gather_weight, x.rows()))


def _gather_weight(part, axis, counts, dim):
    return functional.all_gather(part, axis, counts)


class WholeByRows(nn.Module):
    """Mixin for a module of any type that treats every token by itself, and keeps its weights whole.

    Attribute: `axis`.
    """

    axis: Axis

    def forward(self, *args: Any, **kwargs: Any):
        x = (*args, *kwargs.values())[0]
        if not isinstance(x, ShardedActivation):
            return super().forward(*args, **kwargs)
        with entered_weights(self, self.axis):
            return x.like(super().forward(x.rows()))


class GatheredBatchNorm(Gathered, nn.modules.batchnorm._BatchNorm):
    """Statistics are of the whole batch, on all replicas, as one rank would take them.

    Attributes: `data`, the axis of replicas.
    """

    data: Axis

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.data.size == 1 or not (self.training or self.running_mean is None):
            return super().forward(input)
        input = whole(input)
        self._check_input_dim(input)
        weights: dict[str, Any] = {**self._parameters, **self._gathered(gather)}
        with local():
            return batch_norm(self, input, weights["weight"], weights["bias"], [self.data])


def split_norm(plan: Plan, module: torch.nn.Module) -> None:
    by_rows = isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and len(module.normalized_shape) == 1
    by_rows |= type(module).__name__ == "LlamaRMSNorm"
    split_gathered(plan, module, GatheredByRows if by_rows else Gathered)


def split_gathered(plan: Plan, module: torch.nn.Module, mixin: type[Gathered] = Gathered) -> None:
    """Each parameter along its longest dim; what has none stays whole."""
    plan.swap_class(module, mixin, axis=plan.axis, divided=divide_longest(plan, module))


def split_batch_norm(plan: Plan, module: torch.nn.Module) -> None:
    plan.swap_class(module, GatheredBatchNorm, axis=plan.axis, data=plan.data, divided=divide_longest(plan, module))


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


def replicate_batch_norm(plan: Plan, module: torch.nn.Module) -> None:
    """Weights whole on every rank; statistics of all replicas nevertheless."""
    if _is_batch_norm(module):
        plan.swap_class(module, GatheredBatchNorm, axis=plan.axis, data=plan.data, divided={})


def _is_batch_norm(module) -> bool:
    """Whether its forward is torch's, of a subclass too."""
    own = nn.modules.batchnorm._BatchNorm
    return isinstance(module, own) and type(module).forward is own.forward and not altered(module)


def divide_longest(plan: Plan, module: torch.nn.Module) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Divide each parameter along its longest dim; {name: (dim, counts by rank)}."""
    divided = {}
    for name, parameter in module._parameters.items():
        if parameter is not None and not parameter.dim():
            plan.whole_parameter(module, name)
        elif parameter is not None:
            dim = max(range(parameter.dim()), key=lambda d: parameter.shape[d])
            plan.split(module, name, dim)
            divided[name] = dim, split_sizes(parameter.shape[dim], plan.axis.size)
    return divided
