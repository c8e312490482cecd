"""A whole weight that was gathered to be read: what is written to it would be lost, and is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from hpctrain.convert.refusals import place
from hpctrain.convert.sharded_activation import whole
from hpctrain.convert.sharding import local

_AUGMENTED = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")}


class GatheredCopy(torch.Tensor):
    """A whole weight, or a part that zero=3 frees again, and views of it.

    Raises:
        ValueError: for operations in place.
    """

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        args, kwargs = whole((args, kwargs or {}))
        with local():
            first = next(iter(tree_leaves((args, kwargs))), None)
            if isinstance(kwargs.get("out", first if writes(func.__name__) else None), cls):
                raise ValueError(
                    f"{place()}: {func.__name__} writes to a view of a weight that is divided over ranks, and would be"
                    " lost; write to the weight itself (weight[index] = value), or do it before parallelize"
                )
            return read(func, args, kwargs)


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
