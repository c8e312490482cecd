"""Norms: weights divided, gathered when used; the work, a few operations an element, is done on every rank.

To divide it, each rank would have to send the others what it made of its part: more time than making it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hpctrain.convert.boundary import gather
from hpctrain.convert.plain import altered
from hpctrain.convert.plan import Plan, Refused
from hpctrain.convert.sharding import local
from hpctrain.grid import Axis
from hpctrain.layers.batch_norm import batch_norm
from hpctrain.shard import split_sizes


class Gathered(nn.Module):
    """Mixin for a module that is given its whole weights for the time of its forward.

    Attributes:
        axis: the ranks that hold the weights.
        divided: {name of a parameter: (dim, counts by rank)}.
    """

    axis: Axis
    divided: dict[str, tuple[int, tuple[int, ...]]]

    def forward(self, *args: Any, **kwargs: Any):
        parts = dict(self._parameters)
        try:
            with local():
                for name, (dim, counts) in self.divided.items():
                    self._parameters[name] = gather(parts[name], self.axis, counts, dim)
            return super().forward(*args, **kwargs)
        finally:
            self._parameters.update(parts)


class GatheredBatchNorm(Gathered, nn.modules.batchnorm._BatchNorm):
    """Statistics are of the whole batch, on all replicas, as one rank would take them.

    Attributes: `data`, the axis of replicas.
    """

    data: Axis

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.data.size == 1 or not (self.training or self.running_mean is None):
            return super().forward(input)
        self._check_input_dim(input)
        parts = self._parameters
        with local():
            weight, bias = (
                gather(parts[name], self.axis, self.divided[name][1], 0) if name in self.divided else parts[name]
                for name in ("weight", "bias")
            )
            return batch_norm(self, input, weight, bias, [self.data])


def split_norm(plan: Plan, module: torch.nn.Module) -> None:
    plan.swap_class(module, Gathered, axis=plan.axis, divided=divide_longest(plan, module))


def split_batch_norm(plan: Plan, module: torch.nn.Module) -> None:
    plan.swap_class(module, GatheredBatchNorm, axis=plan.axis, data=plan.data, divided=divide_longest(plan, module))


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
        if parameter is not None:
            dim = max(range(parameter.dim()), key=lambda d: parameter.shape[d])
            plan.split(module, name, dim)
            divided[name] = dim, split_sizes(parameter.shape[dim], plan.axis.size)
    return divided
