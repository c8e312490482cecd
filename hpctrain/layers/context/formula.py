"""Bytes that attention of cut sequences moves, and those that it has in memory.

With b sequences of s tokens on P = ulysses U × ring R ranks, queries of width h (heads × head width) and keys of width
g, a rank receives, forward and backward together,

    b s / P · (4 (U - 1)/U · (h + g) + 6 (R - 1) · g)

elements, where U divides the key heads: Ulysses takes queries, keys, values and the output each once there and once
back; around the ring go keys and values, twice, and their gradients.

All that a rank has in memory falls as 1/P: of b s / P tokens it keeps 2 (h + g) elements and a number for each head
from forward to backward.
"""

from __future__ import annotations

import torch

from hpctrain.comm import accumulation_dtype
from hpctrain.layers.context.block import CpuFlash
from hpctrain.layers.context.heads import kv_heads, query_heads
from hpctrain.layers.context.mask import Mask
from hpctrain.layers.context.spans import Spans, merged, span_length
from hpctrain.layers.context.tiles import tiles

CAUSAL = Mask()


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


def bytes_in_memory(
    spans: list[Spans], ring: int, ulysses: int, rank: int, *, sequences: int, heads: int, groups: int, width: int,
    mask: Mask = CAUSAL, dtype: torch.dtype = torch.float32,
) -> dict[str, int]:  # fmt: skip
    """Bytes that attention has on sequence rank `rank` of one node, without dropout; arguments as of `bytes_received`.

    - "kept" from forward to backward: queries, keys, values, the output and its lse, of each layer.
    - "shared": the rank's part of the memory that ranks exchange tensors in, the same for all layers; without the
      rounding to pages.
    - "working": the most that backward needs besides, with the gradients that it gives, on a CPU, but for a MiB.

    >>> from hpctrain.layers.context.spans import sequence_spans
    >>> shape = {"sequences": 1, "heads": 8, "groups": 8, "width": 32}
    >>> for ring in 1, 2, 4:
    ...     print(bytes_in_memory(sequence_spans(4096, ring, 1), ring, 1, 0, **shape))
    {'kept': 16908288, 'shared': 0, 'working': 20971520}
    {'kept': 8454144, 'shared': 8388608, 'working': 8388608}
    {'kept': 4227072, 'shared': 4194304, 'working': 4194304}
    """
    ring_rank, place = divmod(rank, ulysses)
    joined = [merged(s for part in spans[r * ulysses : (r + 1) * ulysses] for s in part) for r in range(ring)]
    tokens, mine = span_length(joined[ring_rank]), span_length(spans[rank])
    queries = [part.stop - part.start for part in query_heads(heads, ulysses)]
    keys = [part.stop - part.start for part in kv_heads(heads, groups, ulysses)]
    here, kv = queries[place], 2 * keys[place]
    item, wide, element = dtype.itemsize, accumulation_dtype(dtype).itemsize, sequences * width
    kept = tokens * ((2 * here + kv) * item * element + here * wide * sequences)
    # the largest tile's gradients, and what its kernel has besides: a tensor like its queries, and at most a MiB
    found = [tiles(joined[ring_rank], part, mask, sum(map(span_length, joined)), CpuFlash.triangle) for part in joined]
    most = max((2 * here * t.shape[0] + kv * t.shape[1] for part in found for t in part), default=0) * item
    sums = tokens * kv * wide if ring == 1 else 0
    shared, total = 0, 0 if ring == 1 else tokens * kv * wide
    if ring > 1:
        shared += max(map(span_length, joined)) * kv * (item + wide)
    working = sums + max(most, total) + tokens * here * wide
    if ulysses > 1:
        shared += (
            max(tokens * (heads + 2 * groups) / ulysses, tokens * max(q + 2 * k for q, k in zip(queries, keys))) * item
        )
        working = max(working + tokens * here * item, mine * (heads + 2 * groups) * item)  # grad; what is given
    return {"kept": kept, "shared": int(shared * element), "working": int(working * element)}
