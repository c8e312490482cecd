"""Bytes that attention of cut sequences moves.

With b sequences of s tokens on P = ulysses U × ring R ranks, queries of width h (heads × head width) and keys of width
g, a rank receives, forward and backward together,

    b s / P · (4 (U - 1)/U · (h + g) + 6 (R - 1) · g)

elements, where U divides the key heads: Ulysses takes queries, keys, values and the output each once there and once
back; around the ring go keys and values, twice, and their gradients.
"""

from __future__ import annotations

import torch

from hpctrain.comm import accumulation_dtype
from hpctrain.layers.context.heads import kv_heads, query_heads
from hpctrain.layers.context.spans import Spans, span_length


def bytes_received(
    spans: list[Spans], ring: int, ulysses: int, rank: int, *, sequences: int, heads: int, groups: int, width: int,
    dtype: torch.dtype = torch.float32,
) -> dict[str, int]:  # fmt: skip
    """Bytes that sequence rank `rank` receives along each axis, forward and backward, with `groups` key and value heads
    of `width` elements.

    Sums of the gradients of keys and values go around in float32 at least. Where ring ranks have unequally many tokens
    a sum that goes hop by hop brings those of other ranks, so that its bytes differ by as much.

    >>> from hpctrain.layers.context.spans import sequence_spans
    >>> shape = {"sequences": 1, "heads": 8, "groups": 8, "width": 32}
    >>> bytes_received(sequence_spans(4096, 2, 2), 2, 2, 0, **shape)
    {'ulysses': 4194304, 'ring': 6291456}
    """
    ring_rank, place = divmod(rank, ulysses)
    tokens = [sum(map(span_length, spans[r * ulysses : (r + 1) * ulysses])) for r in range(ring)]
    mine = span_length(spans[rank])
    queries = [part.stop - part.start for part in query_heads(heads, ulysses)]
    keys = [part.stop - part.start for part in kv_heads(heads, groups, ulysses)]
    # to heads: q, k, v and the output's gradient; back: the output and the gradients of q, k, v
    to_heads = (tokens[ring_rank] - mine) * 2 * (queries[place] + keys[place])
    back = mine * 2 * (sum(queries) - queries[place] + sum(keys) - keys[place])
    others = sum(tokens) - tokens[ring_rank]
    item, wide = dtype.itemsize, accumulation_dtype(dtype).itemsize
    blocks = 2 * others * 2 * keys[place] * item  # forward, and again backward
    sums = (ring - 1) * tokens[ring_rank] * 2 * keys[place] * wide
    element = sequences * width
    return {"ulysses": (to_heads + back) * element * item, "ring": (blocks + sums) * element}
