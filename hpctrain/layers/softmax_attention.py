"""Attention whose probabilities are computed, where torch's fused kernels would draw dropout masks of their own, or
have no heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from hpctrain import comm


def softmax_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    scale: float,
    drop: Callable[[torch.Tensor], torch.Tensor] | None = None,
    safe: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """drop(softmax(scale q kᵀ + mask)) v, and what v was multiplied by.

    Args:
        q: (batch, heads, length, width).
        k, v: (batch, heads or a divisor of them, keys, width); each serves as many neighbouring query heads.
        mask: None, booleans (True: attend) or numbers to add, that broadcast to (batch, heads, length, keys).
        drop: a function of the probabilities.
        safe: a query that attends to no key gets zeros, as of torch's `scaled_dot_product_attention`, rather than NaN.
    """
    batch, groups, keys = k.shape[:3]
    # the queries of a group as one longer sequence
    grouped = batch, groups, q.shape[1] // max(1, groups) * q.shape[2]
    scores = ((q * scale).reshape(*grouped, q.shape[3]) @ k.mT).view(*q.shape[:3], keys)
    if mask is not None:
        scores = scores.masked_fill_(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    probabilities = softmax(scores, safe and mask is not None)
    if drop is not None:
        probabilities = drop(probabilities)
    return (probabilities.view(*grouped, keys) @ v).view(*q.shape[:3], v.shape[3]), probabilities


def fused_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, **options: Any
) -> torch.Tensor:
    """torch's `scaled_dot_product_attention`, also where a rank has no heads.

    Without heads, torch's kernels leave the mask out of the graph, and some of torch 2.11 divide by their number, which
    ends the process by SIGFPE.
    """
    if q.dim() == 4 and not q.shape[1]:
        return softmax_attention(q, k, v, mask, scale=1.0)[0]
    return F.scaled_dot_product_attention(q, k, v, mask, **options)


def softmax(scores: torch.Tensor, safe: bool = False) -> torch.Tensor:
    """Over the last dim; in float32 where they have 16 bits. If `safe`, that of nothing but -inf is zeros, not NaN."""
    wide = comm.accumulation_dtype(scores.dtype)
    return (torch._safe_softmax if safe else torch.softmax)(scores, -1, wide).to(scores.dtype)
