"""The product of every divided linear layer: torch's F.linear, or oneDNN's where that is faster."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from hpctrain import gemm
from hpctrain.convert.sharding import local

_PAYS = 1 << 24  # multiplications, of which oneDNN has saved what its kernel took to compile after a few calls


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As F.linear, to rounding."""
    if not _is_faster(x, weight, bias):
        return F.linear(x, weight, bias)
    y = _Linear.apply(x.flatten(0, -2), weight, bias)
    # as torch.matmul does: a hook on a view of which a part was changed in place crashes torch
    return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], len(weight)))


def _is_faster(x, weight, bias) -> bool:
    """Not for what another library follows from operation to operation."""
    if not (x.is_cpu and gemm.is_faster() and x.dim() >= 2 and type(x) is torch.Tensor):
        return False
    if any(each is not None and each.dtype is not torch.float32 for each in (x, weight, bias)):
        return False
    if x.numel() * len(weight) < _PAYS or torch.is_autocast_enabled("cpu") or forward_ad._current_level >= 0:
        return False
    return torch._C._functorch.peek_interpreter_stack() is None and not torch.compiler.is_compiling()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        ctx.bias = bias is not None
        return gemm.mm(x, weight.t()) if bias is None else gemm.addmm(bias, x, weight.t())

    @staticmethod
    def backward(ctx, grad):
        with local():
            x, weight = ctx.saved_tensors
            needs_x, needs_weight, needs_bias = ctx.needs_input_grad
            return (
                gemm.mm(grad, weight) if needs_x else None,
                gemm.mm(grad.t(), x) if needs_weight else None,
                grad.sum(0) if ctx.bias and needs_bias else None,
            )
