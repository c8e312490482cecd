"""Dropout inside attention of which a rank has some heads: the masks that one rank would draw for all of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hpctrain.convert.attention import drop_heads
from hpctrain.convert.tiled_attention import TiledAttention
from hpctrain.grid import Grid
from hpctrain.layers.softmax_attention import softmax_attention


class HeadDropout(TiledAttention):
    """Within it, torch's dropout of (batch, this rank's heads, queries, keys), be it a module, a function or inside
    torch's attention, is of heads `part` of `heads`. Other dropout is of whole activations, and stays what it is.
    Attention without dropout is that of `TiledAttention`.
    """

    def __init__(self, heads: int, part: slice, grid: Grid):
        super().__init__(grid)
        self.heads, self.part = heads, part

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.dropout:
            return self._dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention and (kwargs.get("dropout_p") or args[4:5] > (0.0,)):
            return self._attend(*args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs)

    def _dropout(self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False):
        local = max(1, self.part.stop - self.part.start)  # Hugging Face's GPT-2 goes on with a head of zeros
        if not training or input.dim() != 4 or input.shape[1] not in (local, self.part.stop - self.part.start):
            return F.dropout(input, p, training, inplace)
        drop = drop_heads(p, self.heads, self.part, inplace)
        return input if drop is None else drop(input)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, **options: Any,
    ):  # fmt: skip
        if is_causal:
            attn_mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
        scale = query.shape[3] ** -0.5 if scale is None else scale
        drop = drop_heads(dropout_p, self.heads, self.part)
        return softmax_attention(query, key, value, attn_mask, scale=scale, drop=drop, safe=not is_causal)[0]
