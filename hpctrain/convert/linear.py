"""The products of divided linear layers: torch's F.linear, or where that is faster one by oneDNN, or several in one."""

from __future__ import annotations

from collections.abc import Sequence

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
    if not (fast and _is_plain(x, [(weight, bias)])):
        return F.linear(x, weight, bias)
    return _products(x, [(weight, bias)])[0]


def linears(x: torch.Tensor, layers: Sequence[WeightAndBias]) -> list[torch.Tensor]:
    """F.linear of one input by each, to rounding. Their gradients of the input are added up as they are multiplied."""
    if len(layers) < 2 or not _is_plain(x, layers):
        return [linear(x, weight, bias) for weight, bias in layers]
    return _products(x, layers)


def _products(x, layers):
    found = _Linears.apply(x.flatten(0, -2), *(each for layer in layers for each in layer))
    # as torch.matmul does: a hook on a view of which a part was changed in place crashes torch
    return [torch.ops.aten._unsafe_view(y, (*x.shape[:-1], y.shape[1])) for y in found]


def _is_plain(x, layers) -> bool:
    """Not what another library follows from operation to operation, or torch would cast."""
    if x.dim() < 2 or type(x) is not torch.Tensor or torch.is_autocast_enabled(x.device.type):
        return False
    if any(each is not None and each.dtype is not x.dtype for layer in layers for each in layer):
        return False
    if forward_ad._current_level >= 0 or torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is None


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *weights_and_biases):
        weights, biases = weights_and_biases[::2], weights_and_biases[1::2]
        ctx.save_for_backward(x, *weights)
        ctx.set_materialize_grads(False)
        return tuple(
            gemm.mm(x, weight.t()) if bias is None else gemm.addmm(bias, x, weight.t())
            for weight, bias in zip(weights, biases)
        )

    @staticmethod
    def backward(ctx, *grads):
        with local():
            (x, *weights), (needs_x, *needed) = ctx.saved_tensors, ctx.needs_input_grad
            of_x: torch.Tensor | None = None
            others: list[torch.Tensor | None] = []
            for grad, weight, needs_weight, needs_bias in zip(grads, weights, needed[::2], needed[1::2]):
                if grad is None:  # nobody went on with this product
                    others += [None, None]
                    continue
                if of_x is not None:
                    of_x = gemm.addmm(of_x, grad, weight, out=None if torch.is_grad_enabled() else of_x)
                elif needs_x:
                    of_x = gemm.mm(grad, weight)
                others += [gemm.mm(grad.t(), x) if needs_weight else None, grad.sum(0) if needs_bias else None]
            return of_x, *others
