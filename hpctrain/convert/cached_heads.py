"""Hugging Face's caches of keys and values, of which each rank has its heads.

Those that a cache came with, as the prefixes that peft learns, are of all heads. Of a rank without heads, a layer that
takes its length from the size of its keys would say that it is empty, and the model that the sequence begins anew.
"""

from __future__ import annotations

import types
from typing import Any

import torch

from hpctrain.convert.boundary import enter
from hpctrain.grid import Axis


def layer_of(caches: list[Any], number: int | None, crosses: bool) -> Any:
    """The layer of this number of the cache among what a forward is given; None where there is none yet.

    Args:
        crosses: whether its attention is to another sequence, for which there may be a cache apart.
    """
    for cache in caches:
        if hasattr(cache, "get_seq_length") and number is not None:
            layers = getattr(cache, "cross_attention_cache" if crosses else "self_attention_cache", cache).layers
            return layers[number] if number < len(layers) else None
    return None


def take_heads(layer: Any, axis: Axis, part: slice, key_heads: int) -> list[torch.Tensor]:
    """Of what a layer of a cache came with, this rank goes on with key heads `part` of so many. Returns what is learned
    of that, of whose gradient each rank gives a part."""
    if not getattr(layer, "is_initialized", False) or hasattr(layer, "divided") or layer.keys.shape[1] != key_heads:
        return []
    layer.keys, layer.values = (enter(x, axis)[:, part] for x in (layer.keys, layer.values))
    mark_divided(layer, part.stop > part.start)
    return [x for x in (layer.keys, layer.values) if x.requires_grad]


def mark_divided(layer: Any, has_heads: bool) -> None:
    """Note that it has this rank's heads, if any, since this rank's attention was given it."""
    if layer is not None:
        layer.divided = True
        if not has_heads and not hasattr(layer, "cumulative_length"):  # which others count
            layer.get_seq_length = types.MethodType(_length, layer)


def _length(layer):
    return layer.keys.shape[-2] if layer.is_initialized else 0
