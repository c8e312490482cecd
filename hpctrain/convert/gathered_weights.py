"""Weights that are divided, and gathered when used: every rank does the work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hpctrain.convert.boundary import gather
from hpctrain.convert.sharding import local
from hpctrain.grid import Axis
from hpctrain.shard import split_sizes

if TYPE_CHECKING:
    from hpctrain.convert.plan import Plan


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


class Gathered(nn.Module):
    """Mixin for a module that is given its whole weights for the time of its forward.

    Attributes:
        axis: the ranks that have the weights.
        divided: {name of a parameter: (dim, counts by rank)}.
    """

    axis: Axis
    divided: dict[str, tuple[int, tuple[int, ...]]]

    def forward(self, *args: Any, **kwargs: Any):
        parts: dict[str, Any] = self._parameters
        with local():
            whole = {name: gather(parts[name], self.axis, counts, dim) for name, (dim, counts) in self.divided.items()}
        with other_weights(self, whole):
            return super().forward(*args, **kwargs)


def split_gathered(plan: Plan, module: torch.nn.Module, mixin: type[Gathered] = Gathered) -> None:
    """Each parameter along its longest dim; what has none stays whole."""
    divided = {}
    for name, parameter in module._parameters.items():
        if parameter is not None and not parameter.dim():
            plan.whole_parameter(module, name)
        elif parameter is not None:
            dim = max(range(parameter.dim()), key=lambda d: parameter.shape[d])
            plan.split(module, name, dim)
            divided[name] = dim, split_sizes(parameter.shape[dim], plan.axis.size)
    plan.swap_class(module, mixin, axis=plan.axis, divided=divided)
