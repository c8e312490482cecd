"""An activation of which this rank has some rows, and which is the whole one to all code that is not ours.

The last layer of a divided unit, such as the projection back of attention, leaves its result so: ranks sum and scatter
it, rather than each having all. Sums, dropout and norms, which treat every token by itself, go on with the rows of a
rank, and the next unit gathers them. That is the residual stream of a transformer. Whoever does anything else with it
gets the whole activation, gathered then and there and differentiable, the same on every rank; so all ranks must.

Source: Korthikanti et al., "Reducing activation recomputation in large transformer models" (2022), section 4.2.2, whose
g and ḡ are `enter` and `leave` here; that what is gathered is not kept, but gathered once more in backward, as there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from hpctrain.convert import boundary
from hpctrain.convert.dropout import kept, scaled
from hpctrain.convert.gathered_copy import all_present
from hpctrain.convert.gathering_again import once_more
from hpctrain.convert.handed_out import Parts, check_inputs, gradients, handed_out, written
from hpctrain.convert.refusals import check_recomputed, function_given, place
from hpctrain.convert.sharding import ATTRIBUTES, local
from hpctrain.convert.token_rows import TokenRows
from hpctrain.grid import Axis


class ShardedActivation(torch.Tensor):
    """Rows of an activation of shape (…, features), whose leading dims are counted through.

    It is a tensor of (rows of this rank, features), and has the shape of the whole. Where the whole was written to,
    this rank's rows are taken from it again.

    Attributes: `axis`, the ranks that share it; `whole_shape`.

    Raises:
        ValueError: for its `.data` and what else would be written past autograd, for `retain_grad`, and where an
            autograd.Function reads it.
    """

    axis: Axis
    whole_shape: torch.Size
    _whole: torch.Tensor | None = None  # once gathered
    _as_gathered = 0  # its version

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func.__name__
        first = next(_activations((args, kwargs)), None)
        if first is None or name in _REFUSED or func == _DATA:
            raise _refused(name)
        if (reader := function_given(first)) is not None:
            check_recomputed()
            raise _refused(reader)
        if func is torch.autograd.grad:
            return gradients(types, *args, **kwargs)
        if func is torch.autograd.backward:
            check_inputs(kwargs["inputs"])
        if name in _OF_THE_ROWS or (name == "__get__" and func not in _OF_THE_WHOLE):
            with local():
                return func(*args, **kwargs)
        if func in _SIZES:
            return func(torch.empty(first.whole_shape, dtype=first.dtype, device="meta"), *args[1:], **kwargs)
        if any(kind is not cls for kind in types):
            args, kwargs = all_present(func, args, kwargs)
        result = _by_rows(func, name, args, kwargs)
        return _by_whole(func, args, kwargs) if result is None else result

    def __deepcopy__(self, memo):
        return self.whole().__deepcopy__(memo)

    def __reduce_ex__(self, protocol):
        return self.whole().__reduce_ex__(protocol)

    def __hash__(self):
        return id(self)

    def __iter__(self):
        return iter(self.whole())

    def register_hook(self, hook: Callable):
        """The hook is given the whole gradient."""
        return self.parts.register_hook(hook)

    @property
    def parts(self) -> Parts:
        if self._is_written():
            return written(self.whole())
        over, shape = self.over, self.whole_shape
        return Parts(self, lambda rows: over.gather(rows).view(shape), lambda x: over.take(_rows(x)))

    @property
    def over(self) -> TokenRows:
        return rows_of(self.whole_shape, self.axis)

    def rows(self) -> torch.Tensor:
        """Those of this rank, (rows, features), a tensor like any other."""
        if self._is_written():
            return self.over.take(_rows(self._whole))
        with local():
            return self.as_subclass(torch.Tensor)

    def _is_written(self):
        return self._whole is not None and self._whole._version != self._as_gathered

    def whole(self) -> torch.Tensor:
        """Gathered, differentiable; the same tensor each time. Adjoint: the rows of this rank."""
        if self._whole is None:
            with torch.enable_grad():  # others may look at it later
                self._whole = self.over.gather(self.rows()).view(self.whole_shape)
            self._as_gathered = self._whole._version
        return self._whole

    def like(self, rows: torch.Tensor) -> ShardedActivation:
        """Another, of the same shape."""
        return sharded(rows, self.axis, self.whole_shape)


def sharded(rows: torch.Tensor, axis: Axis, whole_shape: Sequence[int]) -> ShardedActivation:
    with local():
        x = rows.as_subclass(ShardedActivation)
    x.axis, x.whole_shape = axis, torch.Size(whole_shape)
    return x


def leave(x: torch.Tensor, axis: Axis, shards: bool) -> torch.Tensor:
    """The sum of every rank's tensor: whole, or with `shards` this rank's rows of it, whose adjoint gathers."""
    if axis.size == 1 or not shards or x.dim() < 2 or gives_whole():
        return boundary.leave(x, axis)
    return of_rows(rows_of(x.shape, axis).leave(_rows(x)), axis, x.shape)


def gives_whole() -> bool:
    """Where no activation can stay divided: in inference mode tensors have no versions, and torch.compile, in code
    between its graphs, would find other shapes than it expects."""
    return torch.is_inference_mode_enabled() or torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None


def rows_of(shape: Sequence[int], axis: Axis) -> TokenRows:
    """Of an activation."""
    return TokenRows(axis, math.prod(shape[:-1]))


def enter(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The whole activation, for every rank to work on its part with. Adjoint: this rank's rows of what they made of it,
    or all."""
    if not isinstance(x, ShardedActivation):
        return boundary.enter(x, axis)
    over, shape = x.over, x.whole_shape
    return once_more(lambda rows: over.enter(rows).view(shape), x.rows())


def rows_in(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """This rank's rows of an activation, sharded or whole."""
    return x.rows() if isinstance(x, ShardedActivation) else rows_of(x.shape, axis).take(_rows(x))


def of_rows(rows: torch.Tensor, axis: Axis, whole_shape: Sequence[int]) -> torch.Tensor:
    """The activation of which every rank has some rows: sharded, or whole where none can be sharded."""
    if gives_whole():
        return rows_of(whole_shape, axis).gather(rows).view(*whole_shape)
    check_recomputed()
    return sharded(rows, axis, whole_shape)


def whole(x: Any, of: Callable[[ShardedActivation], torch.Tensor] = ShardedActivation.whole) -> Any:
    """Whole activations in the place of sharded ones, in tuples, lists and dicts too."""
    if isinstance(x, ShardedActivation):
        return of(x)
    if isinstance(x, dict):
        for key in [key for key, value in x.items() if _has_activations(value)]:
            x[key] = whole(x[key], of)
    elif isinstance(x, (tuple, list)) and _has_activations(x):
        values = [whole(each, of) for each in x]
        return type(x)(*values) if hasattr(x, "_fields") else type(x)(values)
    return x


def returned(output: Any) -> Any:
    """As `whole`, of what a model returns. Of several tensors, the others may come from the rows of one."""
    several = len([*_activations(output, torch.Tensor)]) > 1
    return whole(output, functools.cache(_beside)) if several else whole(output)


def _beside(x):
    return handed_out(x.whole(), x.parts)


def _refused(name) -> ValueError:
    return ValueError(
        f"{place()}: {name} of an activation of which every rank has some rows, for shard_activations=True of "
        "ht.parallelize; do it to a clone of x[...], or leave that option out"
    )


def _activations(x: Any, kind: type = ShardedActivation) -> Iterator[Any]:
    if isinstance(x, kind):
        yield x
    elif isinstance(x, (tuple, list, dict)):
        for each in x.values() if isinstance(x, dict) else x:
            yield from _activations(each, kind)


def _has_activations(x):
    return next(_activations(x), None) is not None


def _rows(x):
    return x.reshape(-1, x.shape[-1])


# What is done to rows, each by itself --------------------------------------------------------------------------------

_METHODS = ("size", "dim", "ndimension", "numel", "nelement", "__len__", "stride", "is_contiguous")
_DATA = ATTRIBUTES["data"].__get__
_SIZES = {
    *(ATTRIBUTES[name].__get__ for name in ("shape", "ndim")),
    *(getattr(torch.Tensor, name) for name in _METHODS),
}
_OF_THE_WHOLE = {ATTRIBUTES[name].__get__ for name in ("shape", "ndim", "nbytes", "T", "mT", "H", "mH", "real", "imag")}
_OF_THE_ROWS = {"is_floating_point", "is_complex", "is_inference", "get_device", "element_size"}
_REFUSED = {"retain_grad", "__set__", "__delete__", "requires_grad_", "register_post_accumulate_grad_hook", "set_"}
_POINTWISE = {"add", "sub", "subtract", "rsub", "mul", "multiply", "div", "divide", "true_divide", "neg"}
_POINTWISE |= {f"__{side}{name}__" for side in ("", "r") for name in ("add", "sub", "mul", "truediv")}
_COPIES = {"to", "float", "double", "half", "bfloat16", "contiguous", "clone"}


def _by_rows(func, name, args, kwargs):
    """The result, of rows; None where it is of the whole."""
    x = args[0] if args else None
    if name in _POINTWISE and "out" not in kwargs:
        return _pointwise(func, args, kwargs)
    others = any(isinstance(each, (torch.Tensor, torch.memory_format)) for each in (*args[1:], *kwargs.values()))
    if not isinstance(x, ShardedActivation) or others:
        return None
    if func is F.dropout:
        return _drop(x, *args[1:], **kwargs)
    if name in _COPIES:
        rows = x.rows()
        copied = func(rows, *args[1:], **kwargs)
        return x if copied is rows else x.like(copied)
    if name in ("view", "reshape") and not kwargs and not isinstance(args[1], torch.dtype):
        return x if func(torch.empty(x.whole_shape, device="meta"), *args[1:]).shape == x.whole_shape else None
    if name == "__getitem__":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return x if all(isinstance(each, slice) and each in _ALL for each in index) else None
    return None


def _drop(x, p=0.5, training=True, inplace=False):
    """What torch's dropout makes of the rows, of a mask that is drawn for all."""
    if inplace or not 0 <= p <= 1:
        return None
    if not training or p == 0:
        return x
    over, rows = x.over, x.rows()
    keep = kept((over.count, rows.shape[1]), p, 0, slice(over.start, over.start + len(rows)), rows)
    return x.like(scaled(rows, keep, p))


_ALL = (slice(None), slice(0, None))


def _pointwise(func, args, kwargs):
    x = next((each for each in args if isinstance(each, ShardedActivation)), None)
    if x is None:
        return None
    operands = [_operand(each, x) if isinstance(each, torch.Tensor) else each for each in args]
    if any(each is None for each in operands) or any(isinstance(each, torch.Tensor) for each in kwargs.values()):
        return None
    return x.like(func(*operands, **kwargs))


def _operand(other, x):
    """What meets the rows of x; None where nobody knows."""
    if isinstance(other, ShardedActivation):
        return other.rows() if other.whole_shape == x.whole_shape else None
    if other.shape[:-1] == x.whole_shape[:-1] and other.shape[-1] in (1, x.whole_shape[-1]):
        return x.over.take(_rows(other))
    if other.numel() == 1 or tuple(other.shape) == (*[1] * (other.dim() - 1), x.whole_shape[-1]):
        if other.dim() > len(x.whole_shape):
            return None
        other = other.reshape(other.shape[-1:])  # alike for all rows, of which each rank has some
        return boundary.enter(other, x.axis) if other.requires_grad else other
    return None


def _by_whole(func, args, kwargs):
    found = {id(x.whole()): x for x in _activations((args, kwargs))}
    args, kwargs = whole((args, kwargs))
    result = func(*args, **kwargs)
    return found.get(id(result), result)  # itself, where it was changed in place
