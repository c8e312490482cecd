"""What may happen to a module with divided weights after parallelize, and what not."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator

import torch

from hpctrain.convert.gathered_copy import gather_part
from hpctrain.convert.gradients import part_of_weight
from hpctrain.convert.refusals import refused, unpicklable
from hpctrain.convert.replicated_parameter import ReplicatedParameter
from hpctrain.convert.sharded_parameter import ShardedParameter, StateShard, attach, whole
from hpctrain.convert.sharding import local


class ShardedModule(torch.nn.Module):
    """Mixin for a module whose own weights are divided, before its type.

    Attributes: `path`, its name in the model; `sharded_weights`, {name of a weight: that in the model}.
    """

    prefix = "Split"  # of the type's name
    path: str
    sharded_weights: dict[str, str]

    def apply(self, fn: Callable):
        """`fn` is given the module with its whole weights, and each rank keeps its part of what it made of them."""
        for child in self.children():
            child.apply(fn)
        with full_weights(self):
            fn(self)
        return self

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """Refuses to put another weight in the place of a divided one, or parts of it beside it (`weight_g`)."""
        for mine, path in self.sharded_weights.items():
            if name.startswith(f"{mine}_"):
                raise ValueError(refused(f"compute from {name!r}", path))
            if name == mine and not _same_sharding(param, self._parameters.get(mine)):
                raise ValueError(refused("put another parameter in the place of", path))
        super().register_parameter(name, param)

    def __delattr__(self, name):
        if name in self.sharded_weights:
            raise ValueError(refused("take away", self.sharded_weights[name]))
        super().__delattr__(name)

    def _apply(self, fn, recurse=True):  # .to(), .double(), .cuda(): of the part
        for parameter in self._parameters.values():
            if parameter is not None:
                gather_part(parameter)
        with local():
            return super()._apply(fn, recurse)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, parameter in self._parameters.items():
            if isinstance(parameter, ShardedParameter) and not keep_vars:
                entry = destination[prefix + name]
                destination[prefix + name] = part_of_weight(entry, parameter.sharding, StateShard)

    def _load_from_state_dict(self, state_dict, prefix, *others):
        """Takes whole weights and, from a state dict of this rank, parts. `state_dict` is torch's copy, in which a
        module may rename what its children read."""
        for name, parameter in self._parameters.items():
            given = state_dict.get(prefix + name)
            if isinstance(parameter, ShardedParameter) and given is not None:
                sharding = parameter.sharding
                if tuple(given.shape) == sharding.whole_shape:
                    state_dict[prefix + name] = sharding.take(given)
        with local():
            super()._load_from_state_dict(state_dict, prefix, *others)

    def __reduce_ex__(self, protocol):
        """copy.deepcopy goes by this; files are refused. A `__deepcopy__` would also be found in a module around this,
        whose `__getattr__` looks here, as peft's do, and its copy would be one of this module alone."""
        if sys._getframe(1).f_code is not copy.deepcopy.__code__:
            raise ValueError(unpicklable(f"the module {self.path}"))
        return super().__reduce_ex__(protocol)


@contextlib.contextmanager
def full_weights(module: torch.nn.Module) -> Iterator[None]:
    """The module's own weights are whole within the block; each rank keeps its part of what they are at its end.

    The parameters stay the same objects, and their parts in the same memory. Collective over the tensor axis.
    """
    parts = {p: p.sharding for p in module._parameters.values() if isinstance(p, ShardedParameter)}
    gradients = {p: p.grad for p in parts}
    memory = {p: (type(p), p.data) for p in parts}  # of which strategies of the data axis may know
    if any(hasattr(p, "gathered") for p in parts):
        raise ValueError("ZeRO-3 spreads the weights over the replicas; change them before parallelize or the trainer")
    for parameter in parts:
        with local(), torch.no_grad():
            data = whole(parameter).as_subclass(torch.Tensor)
        parameter.grad = None
        _make_plain(parameter, data)
    try:
        yield
    finally:
        for parameter, sharding in parts.items():
            kind, data = memory[parameter]
            part = sharding.take(parameter.data)
            parameter.data = data.copy_(part) if part.dtype == data.dtype else part
            attach(parameter, sharding, kind).grad = gradients[parameter]


def _make_plain(parameter: torch.nn.Parameter, data: torch.Tensor) -> None:
    parameter.__class__ = torch.nn.Parameter
    parameter.data = data


def reset(name: str, base: type):
    """`reset_parameters` of the module as it was."""

    def reset_parameters(self):
        with full_weights(self):
            getattr(base, name)(self)

    return reset_parameters


def sharded_type(mixin: type, base: type, root: type | None = None) -> type:
    """The type of a module of type `base` that is divided by `mixin`.

    Args:
        root: the type whose forward `mixin` stands in for, where `base` has another around it: that goes on calling
            its super().forward, or reads the weight, which is whole there.
    """
    prefix = getattr(mixin, "prefix", ShardedModule.prefix)
    own = {"__module__": __name__ if prefix else base.__module__, "__doc__": base.__doc__}
    for method in ("reset_parameters", "_reset_parameters"):
        if hasattr(base, method):
            own[method] = reset(method, base)
    bases = (mixin, ShardedModule, base) if root is None else (ShardedModule, base, mixin, root)
    return type(f"{prefix}{base.__name__}", bases, own)


def _same_sharding(parameter, current) -> bool:
    """Whether a weight may be shared with another module, as `head.weight = table.weight`."""
    if parameter is current:
        return True
    if isinstance(parameter, ReplicatedParameter) and isinstance(current, ReplicatedParameter):
        return parameter.shard == current.shard
    if not (isinstance(parameter, ShardedParameter) and isinstance(current, ShardedParameter)):
        return False
    mine, other = current.sharding, parameter.sharding
    return mine.axis is other.axis and mine.shard == other.shard and mine.counts == other.counts
