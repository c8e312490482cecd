"""Parts of weights and of gradients where parts alone will not do: beside tensors of the whole shape, or for random
numbers, of which every rank draws those of the whole, as one rank would."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from hpctrain.convert.gathered_copy import writes
from hpctrain.convert.part import Part, name_of
from hpctrain.convert.refusals import place
from hpctrain.convert.sharding import ATTRIBUTES, POINTWISE, local

_RANDOM_LIKE = {"rand_like", "randn_like", "randint_like"}
RANDOM = {
    "normal_", "uniform_", "bernoulli_", "exponential_", "cauchy_", "geometric_", "log_normal_", "random_", "normal",
    "poisson",
}  # fmt: skip
# Of torch.nn.init, those that work from the shape: of a part they would take the part's.
_INITIAL = {"xavier_uniform_", "xavier_normal_", "kaiming_normal_", "orthogonal_", "eye_", "dirac_", "sparse_"}
# They ask for attributes, or make parts into the same parts.
_OF_PARTS = {
    "__get__", "__set__", "as_subclass", "__repr__", "__format__", "detach", "detach_", "requires_grad_",
    "share_memory_", "backward",
}  # fmt: skip
_DIMS = {"dim", "ndimension"}
_SIZES = {"numel", "nelement", "size", "__len__", "stride", *_DIMS}
_SHAPES = {ATTRIBUTES[name].__get__ for name in ("shape", "ndim", "nbytes")}
TRANSPOSED = {ATTRIBUTES[name].__get__ for name in ("T", "mT", "H", "mH")}
OF_SHAPE = _SHAPES | TRANSPOSED


def foreign(function: Callable, arguments: Any, options: Any, kind: type) -> bool:
    """Whether a function of tensors of which some are of `kind`, parts, is to be done on whole ones: it draws random
    numbers or writes to an index, an operand has another shape, or a gradient that was made for it needs all of it."""
    name = function.__name__
    if name in _OF_PARTS or name.startswith("_foreach_"):
        return False
    tensors = [x for x in tree_leaves((arguments, options)) if isinstance(x, torch.Tensor)]
    of_kind: list[Any] = [x for x in tensors if isinstance(x, kind)]
    parts = [x for x in of_kind if x.part is not None and x.part.divided]
    if not parts:
        return False
    if name in RANDOM or name in _RANDOM_LIKE or name == "__setitem__" or of_initial(function):
        return True
    with local():
        if parts[0].part.sharding is None:  # a range of replicas', flat
            if any(x.numel() > 1 and x.shape != parts[0].shape for x in tensors):
                raise ValueError(
                    f"{place()}: {name} brings what this rank holds of {parts[0].part.name!r}, {len(parts[0])} elements"
                    " side by side, together with a tensor of another shape; make such tensors by torch.zeros_like of"
                    " the weight or of its gradient, or use zero=0"
                )
            return False
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            return True
        out = options.get("out")
        if name.strip("_") not in POINTWISE:
            if out is not None or (writes(name) and isinstance(tensors[0], kind)):  # as tril_ does
                return True
        elif out is not None and out.shape != parts[0].shape:
            return True
        if lies_as_weight(parts[0]):
            return not parts[0].part.sharding.on_parts(tensors)
        return not all(_is_beside(parts[0], x) for x in tensors)


def _is_beside(first: Any, x: Any) -> bool:
    """Whether an operand has its elements where a part has them that does not lie as the weight does."""
    if hasattr(x, "sharding") or hasattr(x, "part"):
        return x.shape == first.shape and first.part.sharding.is_of(x, first.moved)
    return x.numel() == 1 or x.shape == first.shape


def lies_as_weight(tensor: Any) -> bool:
    """Whether a part has its elements where the weight's part has them, so that the whole can be gathered."""
    sharding = tensor.part and tensor.part.sharding
    with local():
        return sharding is not None and not tensor.moved and tensor.shape == sharding.local_shape


def own_part(part: Any, value: torch.Tensor) -> torch.Tensor:
    """What the `.data` of a part is to be where it is set to `value`: of a whole, this rank's part."""
    with local():
        if lies_as_weight(part) and value.shape == part.part.sharding.whole_shape != part.shape:
            return part.part.sharding.take(value)
        return value


def apply_to_whole(function: Callable, arguments: Any, options: Any, kind: Any, gathered: Callable):
    """What the function makes of whole tensors; where it writes to a part, this rank keeps its own of that.

    Args:
        gathered: the whole of one of `kind`.
    """
    name, out = function.__name__, options.get("out")
    whole_arguments, whole_options = tree_map(lambda x: gathered(x) if isinstance(x, kind) else x, (arguments, options))
    result = function(*whole_arguments, **whole_options)
    first: Any = next(iter(tree_leaves((arguments, options))))
    if name in _RANDOM_LIKE and isinstance(first, kind):
        return first.like(first.part.sharding.take(result))
    written = {}
    if out is not None:
        written = dict(zip(tree_leaves(whole_options["out"]), tree_leaves(out)))
    elif writes(name):
        written = {next(iter(tree_leaves((whole_arguments, whole_options)))): first}
    with local(), torch.no_grad():
        for whole, part in written.items():
            if isinstance(part, kind) and part.part.divided:
                part.as_subclass(torch.Tensor).copy_(part.part.sharding.take(whole))
    return tree_map(lambda x: written.get(x, x) if isinstance(x, torch.Tensor) else x, result)


def of_shape(function: Callable) -> bool:
    """Whether it asks for the shape."""
    return function.__name__ in _SIZES or function in _SHAPES


def asks_shape(function: Callable, part: Part | None) -> bool:
    """Whether it asks for the shape of a part that is not the shape of the whole, or is a transposition of a range.
    (None is a part of several gradients.)"""
    if part is not None and not part.divided:
        return False
    name = function.__name__
    if part is not None and part.sharding is None:
        return of_shape(function) or name == "t" or function in OF_SHAPE
    return of_shape(function) and name not in _DIMS and function != ATTRIBUTES["ndim"].__get__


def whole_shape(function: Any, arguments: Any, options: Any) -> Any:
    """What a function that asks its first argument, a part, for the shape says of the whole, as of the weight itself:
    code of the user's makes noise and means by it.

    Raises:
        ValueError: where the part does not lie as the weight does, be it flat, as replicas share out gradients, or a
            view of another shape, or where it is one of several gradients.
    """
    part, name = arguments[0].part, function.__name__
    if lies_as_weight(arguments[0]):
        whole = torch.empty(part.sharding.whole_shape, dtype=arguments[0].dtype, device="meta")
        return function(whole, *arguments[1:], **options)
    name = function.__self__.__name__ if name == "__get__" else name
    of = name_of(None) if part is None else repr(part.name)
    raise ValueError(
        f"{place()}: {name} of {of} would be that of the part that this rank holds; ask the weight itself,"
        " or .as_subclass(torch.Tensor), which is the part"
    )


def of_initial(function: Callable) -> bool:
    """Whether it is of torch.nn.init."""
    return getattr(function, "__module__", "") == "torch.nn.init"


def refuse_initial(frame: types.FrameType | None) -> None:
    """Raise ValueError where a function of torch.nn.init led to an operation, that looked at the shape of a part."""
    for _ in range(5):
        if frame is None:
            return
        if frame.f_globals.get("__name__") == "torch.nn.init" and frame.f_code.co_name in _INITIAL:
            raise ValueError(
                f"{place()}: nn.init.{frame.f_code.co_name} would take the shape of a part for that of the weight; call"
                " it before parallelize, or by model.apply(function), which gives each module its whole weights"
            )
        frame = frame.f_back
