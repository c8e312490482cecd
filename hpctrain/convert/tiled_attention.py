"""Torch's causal attention inside of somebody's module, by tiles where that is quicker."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from hpctrain.grid import Grid
from hpctrain.layers.context.attention import Context, attend, tiles_pay
from hpctrain.layers.context.mask import Mask
from hpctrain.layers.softmax_attention import fused_attention


class TiledAttention(TorchFunctionMode):
    """Within it, `scaled_dot_product_attention` is of whole sequences. Attribute: `grid`."""

    def __init__(self, grid: Grid):
        super().__init__()
        self.grid = grid

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention and not torch.compiler.is_compiling():
            return self._attention(*args, **kwargs or {})
        return func(*args, **kwargs or {})

    def _attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, **options: Any,
    ):  # fmt: skip
        if is_causal and attn_mask is None and not dropout_p and tiles_pay(query, key, value):
            spans, masks = ((range(query.shape[2]),),), (Mask(),) * len(query)
            scale = query.shape[3] ** -0.5 if scale is None else scale
            return attend(query, key, value, Context(self.grid.ring, self.grid.ulysses, spans, masks, scale))
        options.update(dropout_p=dropout_p, is_causal=is_causal, scale=scale)
        return fused_attention(query, key, value, attn_mask, **options)
