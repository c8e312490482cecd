"""Gradients in a loop of one's own: what code that is not ours computes from them is of the whole gradient, or refused.

A rank holds a part of a weight, and `p.grad` is that part of the gradient; so is what torch.autograd.grad gives, and
`p.data` is the part of the weight. Where elements are treated by themselves, as optimizers mostly do, the part is all
that is needed. Norms, sums and the like, as torch.nn.utils.clip_grad_norm_ and torch.amp.GradScaler take, are completed
over the ranks; all ranks call them, as they run the same script.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterable, Sequence

import torch
from torch.utils._pytree import tree_leaves

from hpctrain import comm
from hpctrain.convert import function_kinds as kinds
from hpctrain.convert.gathered_copy import writes
from hpctrain.convert.part import Part, name_of
from hpctrain.convert.refusals import caller, unpicklable
from hpctrain.convert.sharding import ATTRIBUTES, POINTWISE, Sharding
from hpctrain.convert.whole_operands import (
    OF_SHAPE,
    RANDOM,
    apply_to_whole,
    asks_shape,
    foreign,
    lies_as_weight,
    refuse_initial,
    whole_shape,
)
from hpctrain.rank_gradient import RankGradient, as_tensors, mark_zeroed

NOT_SUMMED = (
    "the gradients of the replicas are not summed yet; call ht.sync_gradients(model) after the last backward, before {}"
    ", or average them with zero=0 of ht.parallelize"
)
_DATA = ATTRIBUTES["data"].__get__


class PartialGradient(RankGradient):
    """A gradient of which this rank holds a part, and what is made of it element by element; or `.data` of a weight.

    Where code that is not torch's brings it together with tensors of the whole shape, or draws random numbers for it,
    that is done on the whole, and this rank keeps its part.

    Attributes:
        part: see `Part`; None of several gradients put together.
        summed: over the replicas.
        in_place: whether the elements lie as in the weight, not transposed, say.

    Raises:
        ValueError: when something else is made of it, or, on a grid with replicas, before their gradients are summed.
    """

    part: Part | None = None
    in_place = True

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        name, options = function.__name__, options or {}
        mark_zeroed(name, arguments)
        if name not in kinds.UNREAD or function == _DATA:
            _complete_replicas(_first(arguments, options))
        unread = name == "__get__" and function not in OF_SHAPE  # optimizers ask for many attributes
        library = "torch" if unread else caller(sys._getframe(1))
        if library == "hpctrain":  # states of optimizers, that code of a user's made
            with as_tensors():
                return function(*arguments, **options)
        by_others = library != "torch"
        if by_others:
            if asks_shape(function, _first(arguments, options).part):
                return whole_shape(function, arguments, options)
            late = unsummed((*arguments[1:], *options.values()))
            written = options.get("out", arguments[0]) if writes(name) or "out" in options else None
            if written is not None and not unsummed([written]):  # a weight, or anything but such a gradient
                complete(name, late)
            for each in late:
                _complete_replicas(each)
        if name in kinds.NOT_LINEAR:
            complete(name, unsummed(arguments))
        if (by_others or name in RANDOM) and foreign(function, arguments, options, cls):
            refuse_initial(sys._getframe(1))
            return apply_to_whole(function, arguments, options, cls, gathered)
        if name in kinds.NORMS:
            return _norm(function, arguments, options)
        of_two = name in ("max", "min") and len(arguments) == 2 and isinstance(arguments[1], torch.Tensor)
        if name in kinds.COMPLETED and not of_two:
            return _complete(name, function, arguments, options)
        if name in kinds.MIXING:
            _check_whole(name, _first(arguments, options))
        with as_tensors():
            result = function(*arguments, **options)
            if name == "_amp_foreach_non_finite_check_and_unscale_":
                _agree_on_overflow(arguments)
            if name in kinds.COMPARED:
                return _all_agree(result, _first(arguments, options))
            if by_others and name.startswith("_foreach_") and isinstance(result, tuple):
                rows = zip(*(given for given in arguments if isinstance(given, (list, tuple))))
                sources = [next((x for x in row if isinstance(x, PartialGradient)), None) for row in rows]
                return [x if source is None else _inherit(name, x, source) for x, source in zip(result, sources)]
            if type(result) is not torch.Tensor or name in kinds.UNTYPED or (name in kinds.PLAIN and not by_others):
                return result
            if any(result is given for given in (*arguments, *options.values())):  # changed in place
                return result
            source = _first(arguments, options)
            if source.part is not None and source.part.divided and source.part.sharding is not None:
                if name in kinds.SIZED:
                    return result
                if by_others and name.strip("_") not in kinds.BY_ELEMENTS:
                    if all(map(_is_gatherable, tree_leaves((arguments, options)))):
                        return apply_to_whole(function, arguments, options, cls, gathered)
                    result = source.like(result)
                    result.part = None
                    return result
            result = _inherit(name, result, source)
            if function == _DATA or name == "detach":
                result.seen_by = source
            return result

    def like(self, tensor: torch.Tensor) -> PartialGradient:
        """Another part, of the same."""
        result = tensor.as_subclass(type(self))
        result.part, result.summed, result.of_sum = self.part, self.summed, self.of_sum
        result.in_place = self.in_place
        return result

    def __deepcopy__(self, memo):
        _complete_replicas(self)
        memo[id(self)] = self.like(copy.deepcopy(_plain(self), memo))
        return memo[id(self)]

    def __reduce_ex__(self, protocol):
        if self.part is not None and self.part.divided and self.part.of_weight:
            instead = "save ht.gather_state_dict(model), or .as_subclass(torch.Tensor), which is the part"
            raise ValueError(unpicklable(name_of(self.part), instead))
        return super().__reduce_ex__(protocol)

    def data_ptr(self):
        if caller(sys._getframe(1)) == "safetensors":
            self.__reduce_ex__(2)
        with as_tensors():
            return super().data_ptr()


# What it does to tensors ---------------------------------------------------------------------------------------------


def _first(arguments, options) -> PartialGradient:
    """The first of its arguments, looked for in lists too."""
    stack = [*reversed(list(options.values())), *reversed(arguments)]
    while stack:
        value = stack.pop()
        if isinstance(value, PartialGradient):
            return value
        if isinstance(value, (list, tuple)):
            stack.extend(reversed(value))
    raise AssertionError("no partial gradient")


def _plain(gradient):
    with as_tensors():
        return gradient.as_subclass(torch.Tensor)


def _is_gatherable(x) -> bool:
    """Whether it is no part, or one of which the whole can be gathered."""
    return not isinstance(x, PartialGradient) or x.part is None or not x.part.divided or lies_as_weight(x)


def _inherit(name, result, source):
    """The result is such a part too, of the same gradient where every element was treated by itself."""
    same = result.numel() == source.numel()
    if result.numel() < source.numel():
        _check_whole(name, source)
    result = source.like(result)
    if source.part and source.part.divided and not same:
        result.part = None
    pointwise = name.strip("_") in POINTWISE or name in kinds.UNMOVED
    result.in_place = source.in_place and pointwise and result.shape == source.shape
    return result


def part_of_weight(
    tensor: torch.Tensor, sharding: Sharding, kind: type[PartialGradient] = PartialGradient
) -> PartialGradient:
    """A tensor of this rank's part of a weight, to code that is not ours."""
    part = tensor.as_subclass(kind)
    part.part = Part(sharding.path, None, (sharding.axis,), sharding=sharding)
    return part


def part_of_gradient(tensor: torch.Tensor, parameter: torch.Tensor, sharding: Sharding) -> PartialGradient:
    """The same of its gradient, that backward has not left there."""
    part = part_of_weight(tensor, sharding)
    part.part = getattr(vars(parameter).get("arrival"), "part", part.part)
    part.summed = sharding.replicas == 1
    return part


def gathered(tensor: PartialGradient) -> torch.Tensor:
    """The whole; differentiable. Collective over the tensor axis."""
    name = "a whole"
    part = _check_completed(name, tensor)
    with as_tensors():
        if not part.divided:
            return tensor.as_subclass(torch.Tensor)
        if not lies_as_weight(tensor):
            _check_whole(name, tensor)
        assert part.sharding is not None
        return part.sharding.gather(tensor.as_subclass(torch.Tensor))


def _complete_replicas(gradient) -> None:
    if gradient is not None and not gradient.summed and gradient.part and gradient.part.complete:
        complete = gradient.part.complete()
        if complete is not None:
            complete()


def _check_whole(name, gradient) -> None:
    """Raises ValueError unless this rank has the whole gradient."""
    if gradient.part is None or gradient.part.divided:
        of_weight = gradient.part and gradient.part.of_weight
        instead = "the weight itself is the whole one" if of_weight else "ht.clip_grad_norm_ gives the norm of all"
        raise ValueError(
            f"{name} of {name_of(gradient.part)} would be that of the part that this rank holds; {instead}, "
            "replicate=[...] of ht.parallelize leaves a module whole, and .as_subclass(torch.Tensor) is the part"
        )
    _check_completed(name, gradient)


def unsummed(arguments: Iterable) -> list[PartialGradient]:
    """Of the arguments of an operation, in lists too, the gradients that are those of one replica."""
    several = [x for each in arguments for x in (each if isinstance(each, (list, tuple)) else (each,))]
    return [each for each in several if isinstance(each, PartialGradient) and not each.summed]


def complete(name: str, gradients: Sequence[PartialGradient]) -> None:
    """Average those that are to change a weight over the replicas. Raises ValueError where nobody does that."""
    for gradient in gradients:
        _check_completed(name, gradient)


def _check_completed(name, gradient) -> Part:
    if gradient.part is None:
        _check_whole(name, gradient)
    _complete_replicas(gradient)  # a later one of a list
    if not gradient.summed:
        raise ValueError(NOT_SUMMED.format(f"{name} of the gradient of {gradient.part.name!r}"))
    return gradient.part


def _norm(function, arguments, options):
    """Norms of whole gradients: of one, or of a list."""
    name = function.__name__
    values, *others = arguments
    wanted = others[0] if others else options.get("p", options.get("ord"))
    order = 2.0 if wanted in (None, "fro") else wanted
    gradients = values if isinstance(values, (list, tuple)) else [values]
    if isinstance(order, str) or len(others) > 1 + (name == "_foreach_norm") or options.get("dim") is not None:
        _check_whole(name, _first(arguments, options))
        with as_tensors():
            return function(*arguments, **options)
    parts = [_check_completed(name, g) if isinstance(g, PartialGradient) else None for g in gradients]
    order = float(order)
    with as_tensors():
        filled = [g if g.numel() else g.new_zeros(1) for g in gradients]  # of no elements, some norms are refused
        result = function(filled if gradients is values else filled[0], *others, **options)
    norms = list(result) if gradients is values else [result]
    divided = {i: part for i, part in enumerate(parts) if part and part.divided}
    if divided:
        own = torch.stack([norms[i] for i in divided]).double().cpu()
        for i, norm in zip(divided, _of_all(own, list(divided.values()), order)):
            norms[i] = norm.to(norms[i])
    return norms if gradients is values else norms[0]


def _of_all(own, parts, order: float):
    """Norms, of those of the ranks' parts."""
    power = order != 0 and math.isfinite(order)
    op = "sum" if math.isfinite(order) else "max" if order > 0 else "min"
    totals = own.pow(order) if power else own
    for axis in dict.fromkeys(axis for part in parts for axis in part.axes):
        over = torch.tensor([axis in part.axes for part in parts])
        totals[over] = comm.all_reduce(totals[over], axis, op)
    return totals.pow(1 / order) if power else totals


def _complete(name, function, arguments, options):
    gradient = _first(arguments, options)
    if len(arguments) > 1 or options:  # along a dim
        _check_whole(name, gradient)
        with as_tensors():
            return function(*arguments, **options)
    op, nothing = kinds.COMPLETED[name]
    part = _check_completed(name, gradient)
    with as_tensors():
        own = function(gradient if gradient.numel() else gradient.new_zeros(1))
    if not part.divided:
        return own
    total = own.double().cpu().reshape(1) if gradient.numel() else torch.tensor([nothing], dtype=torch.float64)
    for axis in part.axes:
        total = comm.all_reduce(total, axis, op)
    return total[0].to(own)


def _agree_on_overflow(arguments) -> None:
    """torch.amp.GradScaler leaves out a step on all ranks, or on none."""
    gradients, found, _ = arguments
    grid = next(g.part.grid for g in gradients if isinstance(g, PartialGradient) and g.part and g.part.grid)
    for axis in (grid.tensor, grid.data):
        comm.all_reduce(found, axis, "max")


def _all_agree(same: bool, gradient) -> bool:
    flag = torch.tensor([float(same)])
    for axis in gradient.part.axes if gradient.part else ():
        flag = comm.all_reduce(flag, axis, "min")
    return bool(flag)
