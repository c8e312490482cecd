"""A weight of which this rank holds a part, and which is the whole one to all code outside of its own module.

The module's own forward multiplies by the part, under `local()`. Whoever else reads the weight, be it a forward of the
user's (`F.linear(h, self.table.weight)`, a penalty, a norm of the weights), gets the whole one, gathered then and there
and differentiable: every rank computes the same from it, so that its gradient is whole on every rank, and each keeps
its part of that. What changes the weight in place, as optimizers do, works on the parts where every element is changed
by itself, and otherwise on the whole. `.grad`, `.data` and `.detach()` are the part, on which optimizers work, and of
which nobody can make what would be that of a part (gradients.py); but in a forward of the user's, and in peft, `.data`
and `.detach()` stand for the whole weight as well.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.optim import optimizer as _optimizer
from torch.utils._pytree import tree_leaves, tree_map

from hpctrain.convert.arriving_gradients import mark_copy
from hpctrain.convert.gathered_copy import GatheredCopy, gather_part, present, read, writes
from hpctrain.convert.gradients import (
    PartialGradient,
    complete,
    gathered,
    part_of_gradient,
    part_of_weight,
    unsummed,
)
from hpctrain.convert.refusals import (
    by_package,
    by_user,
    caller,
    check_function,
    compared,
    offloaded,
    place,
    refused,
    unpicklable,
    wants_whole,
)
from hpctrain.convert.replicated_parameter import ReplicatedParameter
from hpctrain.convert.sharded_activation import whole as whole_activation
from hpctrain.convert.sharding import ATTRIBUTES, METADATA, POINTWISE, VIEWS, Sharding, hooked, local
from hpctrain.convert.spread_part import SpreadPart
from hpctrain.convert.whole_operands import of_initial, refuse_initial
from hpctrain.parameter import annotate
from hpctrain.shard import Shard


class Sharded(torch.Tensor):
    """Mixin for a tensor of which this rank has a part (see above). Attribute: `sharding`.

    Gathering is collective over the tensor axis: as the model itself, all its ranks must read the weight, or none.
    """

    __slots__ = ()
    sharding: Sharding

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if isinstance(kwargs.get("out"), PartialGradient):
            return PartialGradient.__torch_function__(func, types, args, kwargs)
        with local():
            name = func.__name__
            if name == "__get__":
                if func == _DATA:
                    return _detached(args[0], func, sys._getframe(1))
                of_part = func.__self__ not in _OF_THE_WHOLE or compared(sys._getframe(1))
            elif name == "__set__":
                return _set(func, args[0], whole_activation(args[1]))
            elif func is torch.autograd.grad:
                return _gradients(sys._getframe(1), *args, **kwargs)
            elif func is torch.autograd.backward:
                kwargs["inputs"] = _edges(kwargs["inputs"])
                with torch._C._EnableTorchFunction():
                    return func(*args, **kwargs)
            elif name in _MADE_LIKE and by_user(sys._getframe(1)):
                made = func(*args, **kwargs)
                return part_of_weight(made, args[0].sharding) if made.shape == args[0].shape else made
            else:
                of_part = name in METADATA or name in _OF_THE_PART or offloaded(sys._getframe(1))
                if name in _OF_THE_PART:
                    gather_part(args[0])
                if by_user(sys._getframe(1)):
                    of_part = of_part and name != "stride"
                    complete(name, unsummed((*args[1:], *kwargs.values())))
            return func(*args, **kwargs) if of_part else _as_whole(func, name, args, kwargs)

    def __hash__(self):
        return id(self)

    def detach(self):
        """The part; in a forward of the user's, what stands for the whole weight."""
        if sys._getframe(1).f_code is torch.nn.Parameter.__new__.__code__:
            raise ValueError(refused("make another parameter of", self.sharding.path))
        caller = sys._getframe(1) if torch._C._is_torch_function_enabled() else None
        with local():
            return _detached(self, super(Sharded, type(self)).detach, caller)

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            gather_part(self)
            with local():
                data = self.detach().clone(memory_format=torch.preserve_format)
            if isinstance(self, ShardedParameter):
                memo[id(self)] = attach(torch.nn.Parameter(data, self.requires_grad), self.sharding)
                mark_copy(memo[id(self)], self)
            else:
                memo[id(self)] = _tagged(data, self.sharding)
        return memo[id(self)]

    def __reduce_ex__(self, protocol):
        raise ValueError(unpicklable(f"the weight {self.sharding.path!r}"))

    def data_ptr(self):
        if caller(sys._getframe(1)) == "safetensors":  # which reads as many elements as the whole has
            self.__reduce_ex__(2)
        with local():
            return super().data_ptr()


class ShardedParameter(Sharded, torch.nn.Parameter):
    """A weight. Attributes: `shard` and `whole_shape`, of its sharding."""

    shard: Shard
    whole_shape: tuple[int, ...]


class ShardedTensor(Sharded):
    """What was made of a weight element by element, without a gradient, as optimizers do."""


class StateShard(PartialGradient):
    """This rank's part of a weight, as an entry of `state_dict()`; what is made of it is one too.

    Raises:
        ValueError: where it is written to a file, be it by pickle, as torch.save, or by address, as safetensors.
    """

    refused = unpicklable("a tensor of state_dict() of a parallelized model")

    def __reduce_ex__(self, protocol):
        raise ValueError(self.refused)

    def data_ptr(self):
        raise ValueError(self.refused)

    def __deepcopy__(self, memo):
        with local():
            memo[id(self)] = self.like(self.clone())
        return memo[id(self)]


def _tagged(data, sharding):
    data = data.as_subclass(ShardedTensor)
    data.sharding = sharding
    return data


def attach(parameter: torch.nn.Parameter, sharding: Sharding, kind: type = ShardedParameter) -> torch.nn.Parameter:
    """The same object, whose data is the part already, as a ShardedParameter, or an heir."""
    parameter.__class__ = kind
    return annotate(parameter, sharding=sharding, shard=sharding.shard, whole_shape=sharding.whole_shape)


def _detached(tensor, detach, caller):
    if caller is None or by_package(caller):
        return detach(tensor).as_subclass(torch.Tensor)
    is_freed = gather_part(tensor)
    if wants_whole(caller):
        if "gathered" not in vars(tensor):
            return _tagged(detach(tensor), tensor.sharding)
        detach = torch.Tensor.detach  # whose changes zero=3 sees, where `.data` hides them
        tagged = _tagged(detach(tensor), tensor.sharding)
        tagged.gathered = tensor.gathered  # it may be read after its layer
        return tagged
    part = detach(tensor).as_subclass(torch.Tensor)
    if by_user(caller):
        kind = SpreadPart if "gathered" in vars(tensor) else PartialGradient
        return part_of_weight(part.clone() if is_freed else part, tensor.sharding, kind)
    return part.clone().as_subclass(GatheredCopy) if is_freed else part


def whole(parameter: Sharded) -> torch.Tensor:
    """Gathered, differentiable. What does not require a gradient is a copy that nothing may be written to."""
    check_function(parameter, parameter.sharding.path)
    gathered = parameter.sharding.gather(parameter)
    return gathered if gathered.requires_grad else gathered.as_subclass(GatheredCopy)


# ---------------------------------------------------------------------------------------------------------------------

_SIZES = {getattr(torch.Tensor, name) for name in ("size", "numel", "nelement", "__len__", "stride")}
_SIZES |= {ATTRIBUTES["shape"].__get__, ATTRIBUTES["nbytes"].__get__}
_DATA, _GRAD = ATTRIBUTES["data"].__get__, ATTRIBUTES["grad"].__set__
_OF_THE_WHOLE = {ATTRIBUTES["shape"], ATTRIBUTES["nbytes"], *VIEWS}  # of the attributes
_MADE_LIKE = {"zeros_like", "ones_like", "empty_like", "full_like"}
# They read the part's elements; all else that is of the part is `METADATA`.
_OF_THE_PART = {"detach", "__repr__", "__format__"}


def _as_whole(func, name, args, kwargs):
    in_lists = name.startswith(("_foreach_", "_fused_")) and name.endswith("_")  # of optimizers, of parts and parts
    if in_lists and not by_user(sys._getframe(2)):
        return func(*args, **kwargs)
    args, kwargs = whole_activation((args, kwargs))
    leaves = tree_leaves((args, kwargs))
    first = leaves[0]
    mine = isinstance(first, Sharded)
    if func in _SIZES:
        return func(torch.empty(first.sharding.whole_shape, dtype=first.dtype, device="meta"), *args[1:], **kwargs)
    if name == "register_hook":
        return func(first, hooked(args[1], first.sharding))
    for x in leaves:
        if isinstance(x, (Sharded, ReplicatedParameter)):
            gather_part(x)
    if name.startswith("_foreach_") and by_user(sys._getframe(2)):
        _check_rows(name, args)
    if in_lists:
        return func(*args, **kwargs)
    written = kwargs.get("out", first if writes(name) else None)
    if isinstance(written, Sharded):
        return _write(func, name, written, args, kwargs)
    if not torch.is_grad_enabled() and name.removeprefix("_foreach_").strip("_") in POINTWISE:
        sharding = _common_sharding(name, args, kwargs, by_user(sys._getframe(2)))
        if sharding is not None:
            result = func(*args, **kwargs)
            if isinstance(sharding, Sharding):
                return _tagged(result, sharding)
            if mine and name.startswith("_foreach_") and isinstance(result, tuple) and by_user(sys._getframe(2)):
                return [part_of_weight(x, p.sharding) if isinstance(p, Sharded) else x for x, p in zip(result, args[0])]
            return part_of_weight(result, first.sharding) if mine and type(result) is torch.Tensor else result
    return read(func, *tree_map(lambda x: x if x is written else _whole_of(x), (args, kwargs)))


def _whole_of(x):
    return whole(x) if isinstance(x, Sharded) else gathered(x) if isinstance(x, PartialGradient) else present(x)


def _set(func, parameter, value):
    """An attribute; the data of a whole weight are taken to be it."""
    sharding = parameter.sharding
    if isinstance(value, (Sharded, PartialGradient)) and not sharding.is_of(value):
        value = _whole_of(value)
    if isinstance(value, torch.Tensor) and tuple(value.shape) == sharding.whole_shape != sharding.local_shape:
        value = sharding.take(value)
    is_gradient = isinstance(value, PartialGradient) and not (value.part and value.part.of_weight)
    if isinstance(value, (Sharded, PartialGradient)) and not (is_gradient and func == _GRAD):
        value = value.as_subclass(torch.Tensor)
    if func == _GRAD and type(value) is torch.Tensor and by_user(sys._getframe(2)):
        value = part_of_gradient(value, parameter, sharding)
    return func(parameter, value)


def _edges(inputs: Iterable[torch.Tensor]) -> list[Any]:
    """The place of these weights in the graph, for torch.autograd. Unlike weights, it does not come back here where
    torch functions are enabled, as hooks and the forwards of checkpoints need, which backward runs.
    """
    return [get_gradient_edge(x) if isinstance(x, Sharded) else x for x in inputs]


def _gradients(caller, outputs, inputs, *, allow_unused, materialize_grads, **options):
    """torch.autograd.grad: parts, or with a graph the whole ones, of which other gradients can be made."""
    edges = _edges(inputs)
    with torch._C._EnableTorchFunction():
        found = list(torch.autograd.grad(outputs, edges, allow_unused=allow_unused or materialize_grads, **options))
    if materialize_grads:
        wanted = options["create_graph"]
        found = [torch.zeros_like(x, requires_grad=wanted) if g is None else g for x, g in zip(inputs, found)]
    for number, (weight, gradient) in enumerate(zip(inputs, found)):
        if gradient is None or not isinstance(weight, Sharded) or not by_user(caller):
            continue
        sharding = weight.sharding
        if gradient.shape != sharding.local_shape:
            raise ValueError(
                f"torch.autograd.grad of the weight {sharding.path!r}, which is divided over ranks, takes no "
                "is_grads_batched; call it once for each"
            )
        whole = gradient.requires_grad
        found[number] = sharding.gather(gradient) if whole else part_of_gradient(gradient, weight, sharding)
    return tuple(found)


def _common_sharding(name, args, kwargs, of_user) -> Sharding | bool | None:
    """That of the weights in an operation element by element, where all shapes are those of their parts.

    True where they meet other tensors, such as gradients, so that the result is nothing but a part.
    """
    if name.startswith("_foreach_"):
        lists = [value for value in args if isinstance(value, (list, tuple)) and isinstance(value[0], torch.Tensor)]
        return True if len(lists) > 1 and all(len({x.shape for x in row}) == 1 for row in zip(*lists)) else None
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.dim()]
    if of_user:
        if not next(x for x in tensors if isinstance(x, Sharded)).sharding.on_parts(tensors):
            return None
    elif len({x.shape for x in tensors}) != 1:
        return None
    shardings = [x.sharding if isinstance(x, Sharded) else None for x in tensors]
    return shardings[0] if all(sharding is shardings[0] for sharding in shardings) else True


def _check_rows(name, args) -> None:
    """Raises ValueError where parts meet, in an operation on lists, that have not the same elements of theirs."""
    for row in zip(*(given for given in args if isinstance(given, (list, tuple)))):
        parts = [x for x in row if isinstance(x, (Sharded, PartialGradient))]
        mine = next((x for x in parts if isinstance(x, Sharded)), None)
        if mine is not None and not all(map(mine.sharding.is_of, parts)):
            raise ValueError(
                f"{place()}: {name} brings the weight {mine.sharding.path!r} together with one that is divided over "
                "ranks in another way; do it for each weight by itself"
            )


def _write(func, name, parameter, args, kwargs):
    """In place: on the part where every element is changed by itself, otherwise on the whole, and then the part."""
    if parameter.requires_grad and torch.is_grad_enabled() and not of_initial(func):
        return func(*args, **kwargs)  # which torch refuses, in its own words
    refuse_initial(sys._getframe(3))  # from the operation on
    sharding = parameter.sharding
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.dim()]
    if name.strip("_") in POINTWISE:
        of_user = by_user(sys._getframe(3))
        if sharding.on_parts(tensors) if of_user else all(x.shape == parameter.shape for x in tensors):
            return func(*args, **kwargs)
    full = sharding.gather(parameter.detach())
    args, kwargs = tree_map(lambda x: full if x is parameter else _whole_of(x), (args, kwargs))
    result = func(*args, **kwargs)
    if tuple(full.shape) != sharding.whole_shape:
        raise ValueError(
            f"{place()}: {name} gives the weight {sharding.path!r}, which is divided over ranks, another shape; do it"
            " before parallelize"
        )
    parameter.detach().copy_(sharding.take(full))
    return parameter if result is full else result


# As torch's own DTensor does: optimizers on GPUs go on in few kernels.
_optimizer._foreach_supported_types += [ShardedParameter, ReplicatedParameter]
