"""What one call of a model does, by the units that `parallelize` would divide and by what lies between them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpctrain.convert.units import DividedUnit, WholeModule
from hpctrain.plan.operators import COPIES, paths_of_calls

# Element-wise operations that go on with the tokens of a rank, where activations are divided by them.
_BY_ROWS = {"add", "sub", "rsub", "mul", "div", "neg", "native_dropout"}
_MADE_LIKE = ("_like", "empty", "zeros", "ones", "full", "new_", "rand", "arange")
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


class Product(NamedTuple):
    """Of (m, k) by a weight of (k, n), in the module at `path`."""

    path: str
    m: int
    k: int
    n: int


class Attention(NamedTuple):
    """Of all heads: scores, with the features of a head and the tokens of the keys; `causal` leaves out those after a
    query. As `Box.scored` takes it."""

    scores: int
    head_width: int
    length: int
    causal: bool


@dataclass
class Work:
    """What is done in a unit, or in one or more operations between units.

    Attributes:
        unit: its number; None between units.
        inputs: numbers of those whose outputs it takes.
        products: by weights; `mixing`, flop of products of activations; `attention`, in operations of its own.
        operations: that are launched; backward twice as many.
        elements: that element-wise operations give; `out`, that the last operation gives.
        by_rows: between units: goes on with the tokens of a rank.
        weights: between units: elements of those that it takes, whole on every rank.
    """

    unit: int | None
    inputs: set[int] = field(default_factory=set)
    products: list[Product] = field(default_factory=list)
    mixing: float = 0.0
    attention: list[Attention] = field(default_factory=list)
    operations: int = 0
    elements: int = 0
    out: int = 0
    by_rows: bool = False
    weights: int = 0


def trace(
    model: torch.nn.Module, example: Any, units: Sequence[DividedUnit], whole: Mapping[str, WholeModule]
) -> list[Work]:
    """Of a forward of the model; the last takes what it returns. Generators and buffers are as they were afterwards.

    Args:
        units, whole: as `divided_and_whole` gives them.
        example: a tensor, a tuple of arguments, or a dict of those with names.
    """
    recorder = _Recorder(units, whole)
    args, kwargs = example if isinstance(example, tuple) else (example,), {}
    if isinstance(example, Mapping):
        args, kwargs = (), dict(example)
    with torch.no_grad(), _as_before(model), paths_of_calls(model, recorder.path), recorder:
        try:
            y = model(*args, **kwargs)
        except Exception as error:
            raise ValueError(
                f"a plan of {type(model).__name__}: it does not run with the example ({type(error).__name__}: {error})"
            ) from error
    given = {number for leaf in tree_leaves(y) if (number := recorder.number_of(leaf)) is not None}
    if not given:
        raise ValueError(f"a plan of {type(model).__name__}: what it returns for the example depends on no weights")
    recorder.work.append(Work(None, given))
    return recorder.work


class _Call(NamedTuple):
    """Of an operation: its name, the tensors that it is given, and whether it is causal attention."""

    name: str
    tensors: list[torch.Tensor]
    causal: bool


class _Recorder(TorchDispatchMode):
    def __init__(self, units: Sequence[DividedUnit], whole: Mapping[str, WholeModule]):
        super().__init__()
        self.work: list[Work] = []
        self.path: list[str] = []
        self._units, self._whole = units, whole
        self._unit_at = {path: number for number, unit in enumerate(units) for path in unit.paths}
        self._work_of: dict[int | str, int] = {}  # of units, and by path of what is whole
        self._numbers: dict[int, tuple[int, bool]] = {}  # by the identity of a tensor; whether it is inside of a unit
        self._alive: list[torch.Tensor] = []  # whose ids are not given to others

    def number_of(self, value: object) -> int | None:
        """Of the work that gives a tensor; None for what depends on no work."""
        found = self._numbers.get(id(value))
        return None if found is None else found[0]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        named = dict(zip((each.name for each in func._schema.arguments), args)) | (kwargs or {})
        call = _Call(name, tensors, named.get("is_causal", False))
        given = [each for each in tensors if id(each) in self._numbers]
        results = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor) and each.is_floating_point()]
        layer = next((path for path in reversed(self.path) if path in self._unit_at), None)
        if not results or any(mark in name for mark in _MADE_LIKE) or not (given or layer is not None):
            return out
        views = name in COPIES or any(each.alias_info is not None for each in func._schema.returns)
        aliases = bool(views and not name.endswith("_") and given)
        inside = next((self._numbers[id(each)] for each in given if self._numbers[id(each)][1]), None)
        if aliases and (layer is not None or inside or results[0].shape == given[0].shape):
            found = inside or self._numbers[id(given[0])]
        elif layer is None and inside is None:
            found = self._between(call, given, results[0], aliases), False
        elif layer is None and inside is not None:
            found = inside
            self._add(inside[0], call, given, results[0])
        elif layer is not None and not given and views:
            return out  # of a weight
        else:
            assert layer is not None
            number = self._of_unit(self._unit_at[layer], given)
            self._add(number, call, given, results[0])
            found = number, layer in self._units[self._unit_at[layer]].inside
        for each in results:
            self._numbers[id(each)] = found
            self._alive.append(each)
        return out

    def _of_unit(self, unit: int, given) -> int:
        if unit not in self._work_of:
            self._work_of[unit] = len(self.work)
            self.work.append(Work(unit))
        number = self._work_of[unit]
        self.work[number].inputs |= {self._numbers[id(each)][0] for each in given} - {number}
        return number

    def _between(self, call, given, out, aliases) -> int:
        """An operation that takes what one other gives is done with it, where both go on with the same tokens."""
        takes = {self._numbers[id(each)][0] for each in given}
        by_rows = call.name in _BY_ROWS and any(each.shape == out.shape for each in given) and out.dim() > 1
        only = next(iter(takes))
        if (path := self.path[-1] if self.path else "") in self._whole:
            only = self._of_whole(path, takes)
        elif len(takes) > 1 or not self._is_alike(only, by_rows):
            only = len(self.work)
            self.work.append(Work(None, takes, by_rows=by_rows))
        if aliases:
            self.work[only].out = out.numel()
        else:
            self._add(only, call, given, out)
        return only

    def _is_alike(self, number, by_rows) -> bool:
        """Whether it is of operations between modules that have weights, and of the same tokens."""
        work = self.work[number]
        return work.unit is None and not work.weights and work.by_rows == by_rows

    def _of_whole(self, path, takes) -> int:
        if path not in self._work_of:
            self._work_of[path] = len(self.work)
            self.work.append(Work(None, by_rows=self._whole[path].by_rows, weights=self._whole[path].elements))
        number = self._work_of[path]
        self.work[number].inputs |= takes - {number}
        return number

    def _add(self, number, call, given, out):
        """What an operation does."""
        name, tensors, causal = call
        work, given_ids = self.work[number], {id(each) for each in given}
        work.inputs |= {self._numbers[each][0] for each in given_ids} - {number}
        work.out = out.numel()
        work.operations += 1
        path = self.path[-1] if self.path else ""
        if name in _PRODUCTS:
            left, right = tensors[-2:]
            k, n = right.shape[-2:]
            m = left.numel() // k
            if {id(left), id(right)} <= given_ids:
                work.mixing += 2.0 * m * k * n
            else:
                work.products.append(Product(path, m, k, n))
        elif name == "convolution":
            weight, channels = tensors[1], out.shape[1]
            work.products.append(Product(path, out.numel() // channels, weight.numel() // channels, channels))
        elif name.startswith("_scaled_dot_product"):
            query, key = tensors[:2]
            length, head_width = key.shape[-2:]
            work.attention.append(Attention(query.numel() // head_width * length, head_width, length, causal))
        else:
            work.elements += out.numel()


@contextlib.contextmanager
def _as_before(model: torch.nn.Module) -> Iterator[None]:
    """Afterwards generators and buffers are as they were, in the memory that they had."""
    named = [(module._buffers, {**module._buffers}) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    of_python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(), torch.no_grad():
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)
            for names, given in named:
                names.clear()
                names.update(given)
            for buffer, before in buffers:
                buffer.copy_(before)
