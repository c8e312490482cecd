"""The products of divided linear layers: torch's F.linear, or where that is faster one by oneDNN, or several in one."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from hpctrain import gemm
from hpctrain.convert.sharding import local

_PAYS = 1 << 24  # multiplications, of which oneDNN has saved what its kernel took to compile after a few calls

WeightAndBias = tuple[torch.Tensor, torch.Tensor | None]


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As F.linear, to rounding."""
    fast = x.dtype is torch.float32 and x.is_cpu and gemm.is_faster() and x.numel() * len(weight) >= _PAYS
    if not (fast and is_plain(x, [(weight, bias)])):
        return F.linear(x, weight, bias)
    return products(x, [(weight, bias)], x.shape[:-1])[0]


def linears(x: torch.Tensor, layers: Sequence[WeightAndBias]) -> list[torch.Tensor]:
    """F.linear of one input by each, to rounding. Their gradients of the input are added up as they are multiplied."""
    if len(layers) < 2 or not is_plain(x, layers):
        return [linear(x, weight, bias) for weight, bias in layers]
    return products(x, layers, x.shape[:-1])


class Way(Protocol):
    """How a matrix comes into a divided unit, and how a sum of the ranks leaves it."""

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        """What has come in. Scratch memory; in a backward that is differentiated, memory of its own."""

    def summand(self, rows: int, width: int, like: torch.Tensor) -> torch.Tensor:
        """To be filled, and given to `outside`, before anything else is sent."""

    def outside(self, summand: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's."""

    def leave(self, summand: torch.Tensor) -> torch.Tensor:
        """The same, of any memory, differentiable."""


class _Inside:
    """Of products in the middle of a unit, or of one rank."""

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def summand(self, rows: int, width: int, like: torch.Tensor) -> torch.Tensor:
        return like.new_empty(rows, width)

    def outside(self, summand: torch.Tensor) -> torch.Tensor:
        return summand

    leave = outside


_INSIDE = _Inside()


def products(
    x: torch.Tensor, layers: Sequence[WeightAndBias], leading: Sequence[int], way: Way = _INSIDE
) -> list[torch.Tensor]:
    """`linears`, of what `is_plain`, whose results have these dims before their features. The input comes inside by the
    way given, by which the sum of its gradients leaves."""
    found = _Linears.apply(way, x.flatten(0, -2), *(each for layer in layers for each in layer))
    # as torch.matmul does: a hook on a view of which a part was changed in place crashes torch
    return [torch.ops.aten._unsafe_view(y, (*leading, y.shape[1])) for y in found]


def is_plain(x: torch.Tensor, layers: Sequence[WeightAndBias]) -> bool:
    """Of real numbers, and not what another library follows from operation to operation, or torch would cast."""
    if x.dim() < 2 or type(x) is not torch.Tensor or x.is_complex() or torch.is_autocast_enabled(x.device.type):
        return False
    if any(each is not None and each.dtype is not x.dtype for layer in layers for each in layer):
        return False
    if forward_ad._current_level >= 0 or torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is None


def gradient_of(weight: torch.Tensor, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Of the weight by which x was multiplied, from that of the result; in the weight's order of memory, which is the
    other one of Hugging Face's Conv1D, as autograd would copy what is in another order."""
    return gemm.mm(grad.t(), x) if weight.stride(1) == 1 else gemm.mm(x.t(), grad).t()


def _summed(way: Way, factors: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """The sum of every rank's products a b."""
    if torch.is_grad_enabled():
        return way.leave(functools.reduce(torch.add, (gemm.mm(a, b) for a, b in factors)))
    (a, b), *others = factors
    summand = gemm.mm(a, b, out=way.summand(len(a), b.shape[1], a))
    for a, b in others:
        gemm.addmm(summand, a, b, out=summand)
    return way.outside(summand)


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx, way, x, *weights_and_biases):
        weights, biases = weights_and_biases[::2], weights_and_biases[1::2]
        ctx.way = way
        ctx.save_for_backward(x, *weights)
        ctx.set_materialize_grads(False)
        inside = way.inside(x)
        return tuple(
            gemm.mm(inside, weight.t()) if bias is None else gemm.addmm(bias, inside, weight.t())
            for weight, bias in zip(weights, biases)
        )

    @staticmethod
    def backward(ctx, *grads):
        x, *weights = ctx.saved_tensors  # a checkpoint runs the block once more for them, as whoever calls it
        way, (_, needs_x, *needed) = ctx.way, ctx.needs_input_grad
        with local():
            inside = way.inside(x) if any(needed[::2]) else x
            others: list[torch.Tensor | None] = []
            for weight, grad, needs_weight, needs_bias in zip(weights, grads, needed[::2], needed[1::2]):
                known = grad is not None  # somebody went on with this product
                others.append(gradient_of(weight, grad, inside) if known and needs_weight else None)
                others.append(grad.sum(0) if known and needs_bias else None)
            factors = [(grad, weight) for grad, weight in zip(grads, weights) if grad is not None]
            return None, _summed(way, factors) if needs_x else None, *others
