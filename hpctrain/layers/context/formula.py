"""Bytes that attention of cut sequences moves, and how many ranks to give to Ulysses and to the ring.

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


def choose(ranks: int, heads: int, groups: int, method: str = "auto") -> tuple[int, int, str]:
    """(ring, ulysses, why): how `ranks` share a sequence, with `heads` query heads (of this tensor rank) and `groups`
    key heads.

    "ulysses" and "ring" give all ranks to one; "auto" takes the division that moves the fewest bytes, of those that
    give every rank as many heads.

    >>> choose(4, 8, 8)[:2], choose(8, 32, 2)[:2], choose(4, 6, 6)[:2]
    ((1, 4), (8, 1), (2, 2))
    >>> print(choose(4, 6, 6)[2])
    ulysses 2 × ring 2 moves the fewest bytes of those that give every rank as many of the 6 heads: 0.75 of what ring 4
    does
    """
    if method not in ("auto", "ulysses", "ring"):
        raise ValueError(f"sequence.method must be auto, ulysses or ring, got {method!r}")
    if method == "ring":
        return ranks, 1, "sequence.method is ring"
    if method == "ulysses":
        if ranks > heads:
            raise ValueError(
                f"sequence.method = ulysses divides {heads} heads over {ranks} ranks, of which some would have none;"
                f" use auto, or at most {heads} ranks"
            )
        return 1, ranks, "sequence.method is ulysses"
    even = [u for u in range(1, ranks + 1) if ranks % u == 0 and heads % u == 0]
    ulysses = min(even, key=lambda u: (elements(ranks // u, u, heads, groups), -u))
    if ranks == 1:
        return 1, 1, "one rank has the whole sequence"
    share = elements(ranks // ulysses, ulysses, heads, groups) / elements(ranks, 1, heads, groups)
    compared = "" if ulysses == 1 else f": {share:.2f} of what ring {ranks} does"
    why = f"ulysses {ulysses} × ring {ranks // ulysses} moves the fewest bytes of those that give every rank as many of"
    return ranks // ulysses, ulysses, f"{why} the {heads} heads{compared}"


def elements(ring: int, ulysses: int, heads: int, groups: int) -> float:
    """What the busiest rank receives, forward and backward, in units of a token's share of one head.

    >>> elements(2, 2, 8, 8) * 1024 * 32 * 4  # as above, 4096 tokens on 4 ranks
    10485760.0
    """
    keys = max(part.stop - part.start for part in kv_heads(heads, groups, ulysses))
    queries = -(-heads // ulysses)
    mine = 2 * (ulysses - 1) * (queries + keys)
    back = 2 * (heads - queries + sum(p.stop - p.start for p in kv_heads(heads, groups, ulysses)) - keys)
    return mine + back + 6.0 * (ring - 1) * ulysses * keys
