"""Dropout of features or rows of which a rank has some: the masks that one rank would draw for all."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from hpctrain import comm
from hpctrain.convert.hooks import check_hooks
from hpctrain.convert.sources import MethodSource, methods_of
from hpctrain.convert.unit_calls import UnitCalls


def kept(
    shape: Sequence[int], p: float, dim: int, part: slice | torch.Tensor, like: torch.Tensor, inplace: bool = False
) -> torch.Tensor:
    """This rank's part along `dim` of a dropout mask of `shape`, booleans: a slice, or int64 numbers.

    Every rank draws the whole mask from torch's generator. So the mask is the one that torch's dropout would have drawn
    without hpctrain, and all ranks' generators stay in the same state.
    """
    keep = whole_mask(shape, p, like, inplace)
    if isinstance(part, slice):
        return keep.narrow(dim, part.start, part.stop - part.start)
    return keep.index_select(dim, part)


def scaled(x: torch.Tensor, keep: torch.Tensor, p: float, inplace: bool = False) -> torch.Tensor:
    """`x` where it is kept, times 1 / (1 - p), and zeros."""
    if p == 1:
        return x * keep
    if x.is_cuda and not inplace:
        wide = torch.tensor(1 - p, dtype=comm.accumulation_dtype(x.dtype)).item()  # as that kernel of torch's has it
        return x * keep * (1 / wide)
    return x * (keep.to(x.dtype) / (1 - p))


def whole_mask(shape: Sequence[int], p: float, like: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    """The elements that torch's dropout, be it `inplace`, would keep of a whole contiguous tensor, booleans.

    `like` gives the device, and the type, by which kernels of GPUs draw for several elements at once.
    """
    if p == 1:  # torch draws nothing
        return torch.zeros(shape, dtype=torch.bool, device=like.device)
    if like.is_cuda and not inplace:
        return torch.native_dropout(like.new_ones(shape), p, True)[1]
    drawn = like.dtype if like.is_cuda else torch.bool
    return torch.empty(shape, dtype=drawn, device=like.device).bernoulli_(1 - p).bool()


def chance_of(call: ast.Call, method: MethodSource, module: nn.Module) -> tuple[Any, list[tuple[Any, str]]]:
    """The p of a call of F.dropout in a method of `module`, None where nobody knows it; and, where it may change, the
    object that has it and the name of its attribute."""
    p = next((each.value for each in call.keywords if each.arg == "p"), [*call.args[1:2], None][0])
    return method.value(p, module), [(method.value(p.value, module), p.attr)] if isinstance(p, ast.Attribute) else []


class FunctionsThatDrop(TorchFunctionMode):
    """Notes whether a function is given so many features that might drop some, as F.dropout whose p is 0 now."""

    def __init__(self, features: int):
        super().__init__()
        self.features, self.found = features, False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if "dropout" in getattr(func, "__name__", "") and args[0].shape[-1:] == (self.features,):
            self.found = True
        return func(*args, **(kwargs or {}))

    def chances(self, module: nn.Module) -> list[tuple[Any, str]] | None:
        """Whose attributes, of which names, may be their p, as they are 0 in calls in the module's methods; none where
        there are no such functions, and None where nobody can tell of one."""
        if not self.found:
            return []
        methods = [(each, m) for each in module.modules() if type(each) is not nn.Dropout for m in methods_of(each)]
        calls = [(each, m, n) for each, m in methods for n in ast.walk(m.tree) if isinstance(n, ast.Call)]
        drops = [chance_of(n, m, each) for each, m, n in calls if m.value(n.func, each) is F.dropout]
        if any(p is None for p, _ in drops):
            return None
        return [chance for p, found in drops if p == 0 for chance in found] or None


class SplitDropout(nn.Dropout):
    """Mixin for nn.Dropout on features that are divided.

    Attributes: `features`, of the whole; `part`, those of this rank; `unit_calls`, within which alone it may drop any.
    """

    features: int
    part: slice
    path: str
    unit_calls: UnitCalls | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        check_hooks(self)
        if self.unit_calls is not None and self.training and self.p:
            self.unit_calls.check(self.path)
        return drop(input, self, self.features, self.part)


def drop(x: torch.Tensor, module: nn.Dropout, features: int, part: slice) -> torch.Tensor:
    """What nn.Dropout makes of `part` of so many features."""
    if not module.training or module.p == 0:
        return x
    keep = kept((*x.shape[:-1], features), module.p, x.dim() - 1, part, x, module.inplace)
    return scaled(x, keep, module.p, module.inplace)
