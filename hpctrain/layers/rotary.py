"""Rotary position embedding: features i and i + width/2 of a head turn by position · base^(-2i/width).

Source: Su et al., "RoFormer: enhanced transformer with rotary position embedding" (2021); the pairs are those of
Hugging Face's Llama (`rotate_half`).
"""

from __future__ import annotations

import functools

import torch


def rotate(x: torch.Tensor, base: float, start: int = 0) -> torch.Tensor:
    """Turn every head of x, (sequences, length, …, width) with positions from `start` on; width is even."""
    table = _table(start, x.shape[1], x.shape[-1], base, x.dtype, x.device)
    return _Rotate.apply(x, *(part.view(-1, *[1] * (x.dim() - 3), part.shape[-1]) for part in table))


@functools.lru_cache(maxsize=8)  # every layer and microbatch asks for the same one
def _table(start, length, width, base, dtype, device):
    """Cosines, (length, width), and sines, (length, width / 2); angles in float64, whatever the dtype."""
    speeds = base ** (torch.arange(0, width, 2, dtype=torch.float64) / -width)
    angles = torch.outer(torch.arange(start, start + length, dtype=torch.float64), speeds)
    cos, sin = angles.cos().repeat(1, 2), angles.sin()
    return cos.to(device, dtype), sin.to(device, dtype)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.table = cos, sin
        return _turn(x, cos, sin, 1)

    @staticmethod
    def backward(ctx, grad):
        return _turn(grad, *ctx.table, -1), None, None


def _turn(x, cos, sin, sign):
    half = sin.shape[-1]
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin, value=-sign)
    out[..., half:].addcmul_(x[..., :half], sin, value=sign)
    return out
