"""Gradients in a loop of one's own: what code that is not ours computes from them is of the whole gradient, or refused.

A rank holds a part of a weight, and `p.grad` is that part of the gradient; so is what torch.autograd.grad gives, and
`p.data` is the part of the weight. Where elements are treated by themselves, as optimizers mostly do, the part is all
that is needed. Norms, sums and the like, as torch.nn.utils.clip_grad_norm_ and torch.amp.GradScaler take, are completed
over the ranks; all ranks call them, as they run the same script.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Sequence

import torch
from torch.utils._pytree import tree_leaves

from hpctrain import comm
from hpctrain.convert import function_kinds as kinds
from hpctrain.convert.gathered_copy import all_present, writes
from hpctrain.convert.over_parts import agree_on_overflow, all_agree, norms_of_all
from hpctrain.convert.part import Part, name_of
from hpctrain.convert.refusals import caller, unpicklable
from hpctrain.convert.sharding import ATTRIBUTES, POINTWISE, Sharding
from hpctrain.convert.whole_operands import (
    OF_SHAPE,
    RANDOM,
    TRANSPOSED,
    apply_to_whole,
    asks_shape,
    foreign,
    lies_as_weight,
    own_part,
    refuse_initial,
    whole_shape,
)
from hpctrain.rank_gradient import RankGradient, as_tensors, mark_zeroed

NOT_SUMMED = (
    "the gradients of the replicas are not summed yet; call ht.sync_gradients(model) after the last backward, before {}"
    ", or average them with zero=0 of ht.parallelize"
)
_DATA, _SET_DATA = ATTRIBUTES["data"].__get__, ATTRIBUTES["data"].__set__


class PartialGradient(RankGradient):
    """A gradient of which this rank holds a part, and what is made of it element by element; or `.data` of a weight.

    Where code that is not torch's brings it together with tensors of the whole shape, or draws random numbers for it,
    that is done on the whole, and this rank keeps its part.

    Attributes:
        part: see `Part`; None of several gradients put together.
        summed: over the replicas.
        moved: by what the elements do not lie in the order in which they do in the weight, such as transpositions.

    Raises:
        ValueError: when something else is made of it, or, on a grid with replicas, before their gradients are summed.
    """

    part: Part | None = None
    moved: tuple = ()

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
            if not all(issubclass(kind, PartialGradient) for kind in types):
                arguments, options = all_present(function, arguments, options)
            if asks_shape(function, _first(arguments, options).part):
                return whole_shape(function, arguments, options)
            late = unsummed((*arguments[1:], *options.values()))
            written = options.get("out", arguments[0]) if writes(name) or "out" in options else None
            if written is not None and not unsummed([written]):  # a weight, or anything but such a gradient
                complete(name, late)
            for each in late:
                _complete_replicas(each)
            if function == _SET_DATA:
                arguments = arguments[0], own_part(*arguments)
        if name in kinds.NOT_LINEAR or name in kinds.PRODUCTS:
            _complete_operands(name, arguments, options)
        if (by_others or name in RANDOM) and foreign(function, arguments, options, PartialGradient):
            refuse_initial(sys._getframe(1))
            return apply_to_whole(function, arguments, options, PartialGradient, gathered)
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
                known = (g.part for g in arguments[0] if isinstance(g, PartialGradient) and g.part)
                agree_on_overflow(arguments[1], next(part.grid for part in known if part.grid is not None))
            if name in kinds.COMPARED:
                return all_agree(result, _first(arguments, options).part)
            if by_others and name.startswith("_foreach_") and isinstance(result, tuple):
                rows = zip(*(given for given in arguments if isinstance(given, (list, tuple))))
                return [_of_row(function, x, row, options) for x, row in zip(result, rows)]
            several = type(result) is not torch.Tensor
            if several and not (by_others and any(isinstance(x, torch.Tensor) for x in tree_leaves(result))):
                return result
            if name in kinds.UNTYPED or (name in kinds.PLAIN and not by_others):
                return result
            if any(result is given for given in (*arguments, *options.values())):  # changed in place
                return result
            source = _first(arguments, options)
            divided = source.part is not None and source.part.divided and source.part.sharding is not None
            if divided and name in kinds.SIZED:
                return result
            if several and source.part is not None and not source.part.divided:
                return result
            if not several:
                if not (divided and by_others and name.strip("_") not in kinds.BY_ELEMENTS):
                    result = _inherit(function, result, source, arguments, options)
                    if function == _DATA or name == "detach":
                        result.seen_by = source
                    return result
                if not all(map(_is_gatherable, tree_leaves((arguments, options)))):
                    result = source.like(result)
                    result.part = None
                    return result
        return apply_to_whole(function, arguments, options, PartialGradient, gathered)

    def like(self, tensor: torch.Tensor) -> PartialGradient:
        """Another part, of the same."""
        result = tensor.as_subclass(type(self))
        result.part, result.summed, result.of_sum = self.part, self.summed, self.of_sum
        result.moved = self.moved
        return result

    def __deepcopy__(self, memo):
        _complete_replicas(self)
        memo[id(self)] = self.like(copy.deepcopy(_plain(self), memo))
        return memo[id(self)]

    def __reduce_ex__(self, protocol):
        if self.part is not None and self.part.of_weight:
            _check_filed(self)
        return super().__reduce_ex__(protocol)

    def data_ptr(self):
        if caller(sys._getframe(1)) == "safetensors":  # which reads as many elements as the whole has
            _check_filed(self)
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


def _inherit(function, result, source, arguments, options):
    """The result is such a part too, of the same gradient where every element was treated by itself."""
    name, same, stays = function.__name__, result.numel() == source.numel(), result.shape == source.shape
    if result.numel() < source.numel():
        _check_whole(name, source)
    result = source.like(result)
    if unsummed((*arguments, *options.values())):
        result.summed = False
    if source.part and source.part.divided and not same:
        result.part = None
    by_itself = name.removeprefix("_foreach_").strip("_") in POINTWISE or name in kinds.UNMOVED or name == "__get__"
    if not (stays and by_itself and function not in TRANSPOSED) and name not in kinds.RESHAPED:
        by_tensors = any(isinstance(x, torch.Tensor) for x in tree_leaves((arguments[1:], options)))
        how = object() if by_tensors else (function, arguments[1:], options)  # the former is like no other
        result.moved = (*source.moved, how)
    return result


def _of_row(function, result, row, options):
    """Of a function of lists, what it made of the tensors at one place of each."""
    source = next((x for x in row if isinstance(x, PartialGradient)), None)
    return result if source is None else _inherit(function, result, source, row, options)


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
    part.part = getattr(vars(parameter).get("unmanaged"), "part", part.part)
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


def _check_filed(tensor) -> None:
    """Raises ValueError where this rank has a part alone, which a file would hold."""
    if tensor.part is None or tensor.part.divided:
        whole = "gather_state_dict" if tensor.part and tensor.part.of_weight else "gather_gradients"
        instead = f"save ht.{whole}(model), or .as_subclass(torch.Tensor), which is the part"
        raise ValueError(unpicklable(name_of(tensor.part), instead))


def unsummed(arguments: Iterable) -> list[PartialGradient]:
    """Of the arguments of an operation, in lists too, the gradients that are those of one replica."""
    several = [x for each in arguments for x in (each if isinstance(each, (list, tuple)) else (each,))]
    return [each for each in several if isinstance(each, PartialGradient) and not each.summed]


def _complete_operands(name, arguments, options) -> None:
    """Of what is not linear, or of a product where more than one operand is a gradient, or a list of such."""
    found = [unsummed([x]) for x in (*arguments, *(x for key, x in options.items() if key != "out"))]
    if name in kinds.NOT_LINEAR or sum(map(bool, found)) > 1:
        for gradients in found:
            complete(name, gradients)


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
    of_matrix = name == "linalg_norm" and wanted not in (None, "fro") and _dims(values) != 1
    along = len(others) > 1 + (name == "_foreach_norm") or options.get("dim") is not None
    if of_matrix or along or isinstance(order, str):
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
        for i, norm in zip(divided, norms_of_all(own, list(divided.values()), order)):
            norms[i] = norm.to(norms[i])
    return norms if gradients is values else norms[0]


def _dims(gradient) -> int:
    """Of which a replica's range has one alone."""
    return gradient.part.dims if gradient.part and gradient.part.dims else gradient.dim()


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
