"""The operators of a torch module, as one call of it shows them: products by weights, attention, and element-wise
operators, which are merged into the element-wise operator that they take, as in Alpa. Products of one input are one.

What does not depend on the input (weights, masks, positions) is no operator. Views of a tensor are the tensor.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COPIES = {"_unsafe_view", "clone", "_to_copy", "copy", "expand_copy"}  # of which ATen does not say that they are views
ROW_SUMS = {"native_layer_norm", "_fused_rms_norm", "mean", "sum", "var_mean", "linalg_vector_norm"}


@dataclass
class TracedOperator:
    """
    Attributes:
        kind: "product" by a weight, "attention" or "elementwise".
        name: the path of the module that it is in.
        inputs: numbers of the operators whose outputs it takes.
        n_in, n_out: features of a row that it takes and gives.
        heads: of attention.
        norm: an element-wise operator needs sums of a row's features.
    """

    kind: str
    name: str
    inputs: set[int] = field(default_factory=set)
    n_in: int = 0
    n_out: int = 0
    heads: int = 0
    norm: bool = False


def operators(module: torch.nn.Module, x: torch.Tensor) -> list[TracedOperator]:
    """Of a call of the module with x, of (sequences, …, features); the first is the input. Where the output is as large
    as the input, the module is taken for a block of many, whose output the next one takes.

    Raises:
        ValueError: for operators that are neither, named by the module that they are in.
    """
    recorder = _Recorder(x)
    with torch.no_grad(), paths_of_calls(module, recorder.path), recorder:
        y = module(x)
    y = next(leaf for leaf in tree_leaves(y) if isinstance(leaf, torch.Tensor))
    found, last = recorder.found, recorder.number_of(y)
    if last is None:
        raise ValueError(f"the output of {type(module).__name__} does not depend on its input")
    if y.shape == x.shape and last:
        if found[last].kind == "elementwise":
            recorder.merge_into_input(last)
        else:
            found[0].inputs.add(last)
    return found


class _Recorder(TorchDispatchMode):
    def __init__(self, x: torch.Tensor):
        super().__init__()
        self.rows, self.sequences = math.prod(x.shape[:-1]), x.shape[0]
        self.found = [TracedOperator("elementwise", "input", n_in=x.shape[-1], n_out=x.shape[-1])]
        self.path: list[str] = []
        self._numbers: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []  # whose ids are not given to others
        self._after: dict[int, int] = {}  # the element-wise operator that takes a product's output alone
        self._mark(x, 0)

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """The operator that gives a tensor; None where it does not depend on the input."""
        return self._numbers.get(id(tensor))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        given = [each for each in tensors if id(each) in self._numbers]
        given_out = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor) and each.is_floating_point()]
        if given and given_out:
            number = self._number(func, tensors, given, given_out[0])
            for each in given_out:
                self._mark(each, number)
        return out

    def _mark(self, tensor, number):
        self._numbers[id(tensor)] = number
        self._alive.append(tensor)

    def _number(self, func, tensors, given, out) -> int:
        """The operator that a call belongs to."""
        name, takes = func.overloadpacket.__name__, {self._numbers[id(each)] for each in given}
        views = name in COPIES or any(each.alias_info is not None for each in func._schema.returns)
        if views and len(takes) == 1 and not name.endswith("_"):
            return takes.pop()
        if name in ("mm", "addmm", "bmm", "baddbmm"):
            left, right = tensors[-2:]
            if id(right) not in self._numbers and (right.dim() == 2 or right.shape[0] == 1):
                return self._product(left, right, takes)
            if id(left) in self._numbers and id(right) in self._numbers:
                return self._attention(out, given, takes, left.shape[0] // self.sequences)
        elif name.startswith("_scaled_dot_product"):
            return self._attention(out, given, takes, given[0].shape[1])
        elif name not in ("convolution", "_cudnn_rnn", "mkldnn_rnn_layer", "addmv", "embedding"):
            return self._elementwise(name, given, out, takes)
        raise ValueError(
            f"a plan is of products of rows by a weight, attention and element-wise operators, got {name} in "
            f"{self._here() or 'the module'}"
        )

    def _product(self, left, right, takes) -> int:
        n_in, n_out = right.shape[-2:]
        if left.numel() != self.rows * n_in:
            raise ValueError(
                f"a plan is of rows that stay apart: the input has {self.rows}, but {self._here()} multiplies "
                f"{left.numel() // n_in}"
            )
        name = self._here() or "product"
        for number, each in enumerate(self.found):
            if each.kind == "product" and (each.inputs, each.n_in) == (takes, n_in):
                each.n_out, each.name = each.n_out + n_out, f"{each.name}, {name.rpartition('.')[2]}"
                return number
        return self._new(TracedOperator("product", name, takes, n_in, n_out))

    def _attention(self, out, given, takes, heads) -> int:
        n_out = out.numel() // self.rows
        for number in takes:
            if self.found[number].kind == "attention":  # its scores, that multiply the values
                values = sum(each.numel() for each in given if self.number_of(each) != number)
                self._take(number, takes)
                self.found[number].n_in += values // self.rows
                self.found[number].n_out = n_out
                return number
        n_in = sum(each.numel() for each in given) // self.rows
        return self._new(TracedOperator("attention", self._here() or "attention", takes, n_in, n_out, heads))

    def _elementwise(self, name, given, out, takes) -> int:
        number = self._merged(takes)
        features = -(-out.numel() // self.rows)
        if number is None:
            n_in = sum(each.numel() for each in given) // self.rows
            number = self._new(TracedOperator("elementwise", self._here() or name, set(takes), n_in, features))
            if len(takes) == 1:
                self._after[next(iter(takes))] = number
        operator = self.found[number]
        if operator.kind == "elementwise":
            self._take(number, takes)
            operator.n_out = max(operator.n_out, features)
            if name in ROW_SUMS:
                operator.norm, operator.name = True, self._here() or operator.name
        return number

    def _merged(self, takes) -> int | None:
        """The operator that an element-wise one is merged into: of those that it takes, the last element-wise one that
        none of the others waits for."""
        if len(takes) == 1:
            (only,) = takes
            return only if self.found[only].kind != "product" else self._after.get(only)
        for number in sorted(takes, reverse=True):
            others = takes - {number}
            if self.found[number].kind == "elementwise" and not any(self._waits(each, number) for each in others):
                return number
        return None

    def _waits(self, number, other) -> bool:
        """Whether an operator's input depends on another one's output."""
        return any(each == other or self._waits(each, other) for each in self.found[number].inputs if each != number)

    def _take(self, number, takes):
        self.found[number].inputs |= takes - {number}

    def _new(self, operator) -> int:
        self.found.append(operator)
        return len(self.found) - 1

    def merge_into_input(self, last: int) -> None:
        """The sum at a block's end is that before the next one's first norm."""
        first, gone = self.found[0], self.found[last]
        first.inputs |= gone.inputs - {0}
        first.norm |= gone.norm
        first.name = gone.name if first.name == "input" else first.name
        del self.found[last]
        for operator in self.found:
            numbers = {0 if each == last else each - (each > last) for each in operator.inputs}
            operator.inputs = numbers

    def _here(self) -> str:
        return self.path[-1] if self.path else ""


@contextlib.contextmanager
def paths_of_calls(module: torch.nn.Module, paths: list[str]) -> Iterator[None]:
    """Within it `paths` are those of the modules that are being called, the innermost last."""
    handles = []

    def leave(*_):
        paths.pop()

    for path, each in module.named_modules():
        handles.append(each.register_forward_pre_hook(lambda *_, path=path: paths.append(path)))
        handles.append(each.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
