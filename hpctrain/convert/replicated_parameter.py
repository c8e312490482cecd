"""A weight that every rank has whole, and its reads where zero=3 frees its memory while its layer does not compute."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from hpctrain.convert.arriving_gradients import Marker, mark_copy
from hpctrain.convert.gathered_copy import GatheredCopy, read, writes
from hpctrain.convert.refusals import by_package, hook_refused
from hpctrain.convert.sharding import ATTRIBUTES, METADATA, VIEWS, local
from hpctrain.shard import Shard


def gather_part(parameter: torch.Tensor) -> bool:
    """Bring here what zero=3 spreads over the replicas; whether it may be freed before its reader is done with it."""
    zero3 = vars(parameter).get("gathered")
    if zero3 is None:
        return False
    zero3.gather()  # until the layer's next backward, or the end of the step
    return zero3.may_be_freed


class ReplicatedParameter(torch.nn.Parameter):
    """A weight that every rank has whole. Attributes: `shard` and `whole_shape`, which copies keep."""

    shard: Shard
    whole_shape: tuple[int, ...]

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            gather_part(self)
            with local():
                copied = memo[id(self)] = super().__deepcopy__({})
            copied.__dict__.update({key: value for key, value in vars(self).items() if key in ("shard", "whole_shape")})
            mark_copy(copied, self)
        return memo[id(self)]

    def register_hook(self, hook: Callable) -> RemovableHandle:
        marker = vars(self).get("unmanaged")
        if isinstance(marker, Marker) and not marker.summed:
            raise ValueError(hook_refused(marker.part.name))
        return super().register_hook(hook)

    def detach(self):
        is_new = sys._getframe(1).f_code is torch.nn.Parameter.__new__.__code__  # which wants the same type
        return super().detach().as_subclass(ReplicatedParameter if is_new else torch.Tensor)


class ReleasedParameter(ReplicatedParameter):
    """One that zero=3 spreads over replicas by messages, so that it has memory while its layer computes alone.

    Code outside of the layer's forward is given a copy, gathered then and there and differentiable; so all ranks must
    read it, or none. What is written to the weight itself is refused at the next step.
    """

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func.__name__
        with local():
            reads = func.__self__ in _ELEMENTS if name == "__get__" else name not in _NO_ELEMENTS
            reads = reads and not by_package(sys._getframe(1))
            leaves = tree_leaves((args, kwargs)) if reads else []
            for x in leaves:
                if isinstance(x, ReleasedParameter):
                    gather_part(x)
            if not all(kind is torch.Tensor or issubclass(kind, ReleasedParameter) for kind in types):
                return NotImplemented  # parts of others, whose types know what to do with a whole weight
            if not reads or name in _CONVERSIONS:
                return func(*args, **kwargs)
            if func == _DATA:
                return _lent(args[0], args[0].detach())
            if isinstance(leaves[0] if writes(name) else kwargs.get("out"), ReleasedParameter):
                return func(*args, **kwargs)
            return read(func, *tree_map(_copied, (args, kwargs)))

    def detach(self):
        if not torch._C._is_torch_function_enabled() or by_package(sys._getframe(1)):
            return super().detach()
        with local():
            return _lent(self, super().detach())


def _copied(x):
    """What autograd may keep of an operand."""
    if not isinstance(x, ReleasedParameter) or not gather_part(x):
        return x
    copied = x.clone()
    return copied if copied.requires_grad else copied.as_subclass(GatheredCopy)


def _lent(parameter, data):
    """Its data, for a reader that autograd does not follow."""
    return data.clone().as_subclass(GatheredCopy) if gather_part(parameter) else data


_DATA = ATTRIBUTES["data"].__get__
_ELEMENTS = {ATTRIBUTES["data"], *VIEWS}  # of the attributes
_NO_ELEMENTS = METADATA | {"size", "numel", "nelement", "__len__", "__set__", "register_hook"}
# New memory, of which backward needs nothing, or the weight itself.
_CONVERSIONS = {"to", "type", "float", "double", "half", "bfloat16", "cpu", "cuda", "contiguous", "clone"}
