"""GELU in its tanh form, which torch computes in one slow kernel, and others in eight operations, by ours (gelu.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hpctrain.convert.linear import is_plain
from hpctrain.convert.plain import altered, is_of_huggingface
from hpctrain.convert.plan import Plan
from hpctrain.layers.gelu import OURS, fill

_NAMES = ("NewGELUActivation", "GELUTanh")  # of transformers


class FusedTanhGELU(nn.Module):
    """Mixin."""

    def forward(self, *args: Any, **kwargs: Any):
        x: Any = (*args, *kwargs.values())[0]
        # of another memory format theirs has the same, which dropout's masks follow
        if isinstance(x, torch.Tensor) and x.is_cpu and x.dtype in OURS and x.is_contiguous() and is_plain(x, ()):
            return _TwiceDifferentiable.apply(x)
        return super().forward(*args, **kwargs)


class _TwiceDifferentiable(torch.autograd.Function):
    """Keeps x, as the module's own does, of which a second derivative is made."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        y = torch.empty_like(x)
        fill(x, y, None)
        return y

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            return torch.ops.aten.gelu_backward(grad, x, approximate="tanh")
        derivative = torch.empty_like(x)
        fill(x, None, derivative)
        return derivative.mul_(grad)


def fuse_tanh_gelu(plan: Plan, module: nn.Module) -> None:
    """Leaves alone what is none."""
    by_name = is_of_huggingface(module) and type(module).__name__ in _NAMES
    of_torch = type(module) is nn.GELU and module.approximate == "tanh"
    if plan.axis.size > 1 and (by_name or of_torch) and not altered(module):
        plan.swap_class(module, FusedTanhGELU)
