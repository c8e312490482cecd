"""Whole weights that are read where zero=3 may free their memory, or where they were gathered.

What is written to such a copy would be lost, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from hpctrain.convert.refusals import place
from hpctrain.convert.sharding import METADATA, local

_AUGMENTED = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")}

NO_ELEMENTS = METADATA | {"size", "numel", "nelement", "__len__", "__set__", "register_hook"}


class GatheredCopy(torch.Tensor):
    """A whole weight, or a part that zero=3 frees again, and views of it.

    Raises:
        ValueError: for operations in place.
    """

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if isinstance(_written(func, args, kwargs), cls):
            raise ValueError(
                f"{place()}: {func.__name__} writes to a view of a weight that is divided over ranks, and would be"
                " lost; write to the weight itself (weight[index] = value), or do it before parallelize"
            )
        if not all(kind in (cls, torch.Tensor) for kind in types):
            return NotImplemented  # others, whose types know what to do with a whole weight
        with local():
            return read(func, args, kwargs)


def gather_part(parameter: torch.Tensor) -> bool:
    """Bring here what zero=3 spreads over the replicas; whether it may be freed before its reader is done with it."""
    zero3 = vars(parameter).get("gathered")
    if zero3 is None:
        return False
    zero3.gather()  # until the layer's next backward, or the end of the step
    return zero3.readers_need_copy


def present(x: Any) -> Any:
    """An operand; where it is a whole weight, gathered, and a copy where its memory may be freed before backward."""
    if not isinstance(x, torch.nn.Parameter) or hasattr(x, "sharding") or not gather_part(x):
        return x
    with local():
        copied = x.clone()
        return copied if copied.requires_grad else copied.as_subclass(GatheredCopy)


def _written(func, args, kwargs):
    """The operand that a function writes to, if any."""
    first = next(iter(tree_leaves((args, kwargs))), None)
    return kwargs.get("out", first if writes(func.__name__) else None)


def all_present(func: Callable, args: Any, kwargs: Any) -> Any:
    """The operands of a function; what it writes to stays the weight itself."""
    if func.__name__ in NO_ELEMENTS:
        return args, kwargs
    written = _written(func, args, kwargs)
    return tree_map(lambda x: x if x is written else present(x), (args, kwargs))


def read(func: Callable, args: Any, kwargs: Any):
    """The result of a function; views of copies stay copies."""
    result = func(*args, **kwargs)
    copies = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, GatheredCopy)}

    def keep(x):
        is_view = copies and type(x) is torch.Tensor and x.untyped_storage()._cdata in copies
        return x.as_subclass(GatheredCopy) if is_view else x

    return tree_map(keep, result)


def writes(name: str) -> bool:
    """Whether a function of this name changes its first argument."""
    return (name.endswith("_") and not name.endswith("__")) or name in _AUGMENTED or name == "__setitem__"
