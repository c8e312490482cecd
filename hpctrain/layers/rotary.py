"""Rotary position embedding: features i and i + width/2 of a head turn by position · base^(-2i/width).

Source: Su et al., "RoFormer: enhanced transformer with rotary position embedding" (2021); the pairs are those of
Hugging Face's Llama (`rotate_half`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass

import torch

from hpctrain.choices import check_rope_scaling


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's change of the frequencies, for contexts longer than those of pretraining.

    A frequency that turns fewer than `low_freq_factor` times in `original_context` positions is divided by `factor`,
    one that turns more than `high_freq_factor` times stays, and those between are interpolated by their turns.

    Source: Hugging Face's `rope_type` "llama3", whose names these are but for `original_max_position_embeddings`.

    Raises:
        ValueError: as `choices.check_rope_scaling`.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int

    def __post_init__(self):
        check_rope_scaling(dataclasses.astuple(self))

    def apply(self, frequencies: torch.Tensor) -> torch.Tensor:
        """The changed frequencies, in radians a position."""
        turns = self.original_context * frequencies / (2 * math.pi)
        kept = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


def rotate(
    x: torch.Tensor, base: float, spans: tuple[range, ...] | None = None, scaling: RopeScaling | None = None
) -> torch.Tensor:
    """Turn every head of x, (sequences, length, …, width), at the positions of `spans`, by default from 0; width is
    even."""
    spans = (range(x.shape[1]),) if spans is None else spans
    table = _table(spans, x.shape[-1], base, scaling, x.dtype, x.device)
    return _Rotate.apply(x, *(part.view(-1, *[1] * (x.dim() - 3), part.shape[-1]) for part in table))


@functools.lru_cache(maxsize=8)  # every layer and microbatch asks for the same one
def _table(spans, width, base, scaling, dtype, device):
    """Cosines, (length, width), and sines, (length, width / 2); angles in float64, whatever the dtype."""
    frequencies = base ** (torch.arange(0, width, 2, dtype=torch.float64) / -width)
    if scaling is not None:
        frequencies = scaling.apply(frequencies)
    positions = torch.tensor([position for span in spans for position in span], dtype=torch.float64)
    angles = torch.outer(positions, frequencies)
    cos, sin = angles.cos().repeat(1, 2), angles.sin()
    return cos.to(device, dtype), sin.to(device, dtype)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.table = cos, sin
        return _turn(x, cos, sin, 1)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.table
        return _turn(grad, cos, sin, -1), None, None


def _turn(x, cos, sin, sign):
    half = sin.shape[-1]
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin, value=-sign)
    out[..., half:].addcmul_(x[..., :half], sin, value=sign)
    return out
