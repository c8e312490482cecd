"""A weight that every rank has whole, and its reads where zero=3 frees its memory while its layer does not compute."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from hpctrain.convert.arriving_gradients import Marker, mark_copy
from hpctrain.convert.gathered_copy import NO_ELEMENTS, GatheredCopy, all_present, gather_part, read
from hpctrain.convert.refusals import by_package, hook_refused
from hpctrain.convert.sharding import ATTRIBUTES, VIEWS, local
from hpctrain.shard import Shard


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
        is_new = sys._getframe(1).f_code is _NEW_PARAMETER
        return super().detach().as_subclass(type(self) if is_new else torch.Tensor)


class ReleasedParameter(ReplicatedParameter):
    """One that zero=3 spreads over replicas by messages, so that it has memory only while its layer computes.

    Code outside of the layer's forward is given a copy, gathered then and there and differentiable; so all ranks must
    read it, or none. What is written to the weight itself is refused at the next step.
    """

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func.__name__
        with local():
            reads = func.__self__ in _ELEMENTS if name == "__get__" else name not in NO_ELEMENTS
            reads = reads and not by_package(sys._getframe(1))
            leaves = tree_leaves((args, kwargs)) if reads else []
            freed = [gather_part(x) for x in leaves if isinstance(x, ReleasedParameter)]
            if not all(issubclass(kind, (ReleasedParameter, GatheredCopy)) or kind is torch.Tensor for kind in types):
                return NotImplemented  # parts of others, whose types know what to do with a whole weight
            if reads and func == _DATA:
                return _lent(args[0], args[0].detach())
            if not reads or name in _CONVERSIONS or not (any(freed) or GatheredCopy in types):
                return func(*args, **kwargs)
            return read(func, *all_present(func, args, kwargs))

    def detach(self):
        caller = sys._getframe(1)
        if not torch._C._is_torch_function_enabled() or by_package(caller):
            return super().detach()
        with local():
            lent = _lent(self, super().detach())
            return lent.as_subclass(type(self)) if caller.f_code is _NEW_PARAMETER else lent


def _lent(parameter, data):
    """Its data, for a reader that autograd does not follow."""
    return data.clone().as_subclass(GatheredCopy) if gather_part(parameter) else data


_NEW_PARAMETER = torch.nn.Parameter.__new__.__code__  # which wants `detach` to keep the type
_DATA = ATTRIBUTES["data"].__get__
_ELEMENTS = {ATTRIBUTES["data"], *VIEWS}  # of the attributes
# New memory, of which backward needs nothing, or the weight itself.
_CONVERSIONS = {"to", "type", "float", "double", "half", "bfloat16", "cpu", "cuda", "contiguous", "clone"}
