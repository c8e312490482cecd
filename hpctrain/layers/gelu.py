"""GELU in the tanh form of GPT-2."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from hpctrain.once_differentiable import once_differentiable

SLOPE = 2 * math.sqrt(2 / math.pi)
CUBIC = 0.044715
OURS = torch.float32, torch.float64  # of a processor: torch's kernels are not vectorised well in this form
CHUNK = 1 << 16  # elements for each thread at a time: stay in its cache from one operation to the next


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """torch.nn.functional.gelu(x, approximate="tanh"), to rounding; differentiable once."""
    if x.device.type != "cpu" or x.dtype not in OURS:
        return F.gelu(x, approximate="tanh")
    return _TanhGELU.apply(x)


class _TanhGELU(torch.autograd.Function):
    """Keeps the derivative, in place of x."""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        y, derivative = torch.empty_like(x), torch.empty_like(x) if ctx.needs_input_grad[0] else None
        fill(x, y, derivative)
        ctx.save_for_backward(derivative)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (derivative,) = ctx.saved_tensors
        return grad * derivative


def fill(x: torch.Tensor, y: torch.Tensor | None, derivative: torch.Tensor | None) -> None:
    """y with x σ(v), where v = SLOPE (x + CUBIC x³), as σ(v) = (1 + tanh(v / 2)) / 2; and its derivative with

    σ + x σ (1 - σ) v' = σ + σ (1 - σ) (3 v - 2 SLOPE x)
    """
    slope, chunk = x.new_tensor(SLOPE), CHUNK * torch.get_num_threads()
    scratch = x.new_empty(2, min(chunk, x.numel()))
    for start in range(0, x.numel(), chunk):
        part = slice(start, min(start + chunk, x.numel()))
        a, v = x.view(-1)[part], scratch[0, : part.stop - start]
        sigma = scratch[1, : part.stop - start] if derivative is None else derivative.view(-1)[part]
        torch.addcmul(slope, a, a, value=SLOPE * CUBIC, out=v).mul_(a)
        torch.sigmoid(v, out=sigma)
        if y is not None:
            torch.mul(a, sigma, out=y.view(-1)[part])
        if derivative is not None:
            # the logistic function is 0 or 1 out there, and v may be infinite: times 0, that is NaN
            v.clamp_(-1e3, 1e3).sub_(a, alpha=SLOPE * 2 / 3)
            v.addcmul_(v, sigma, value=-1)
            sigma.addcmul_(sigma, v, value=3)
