"""Attention of sequences that are cut over the ring and Ulysses axes.

Within Ulysses ranks tokens are exchanged for heads; then keys and values go around the ring, and the outputs back.

Sources: Jacobs et al., "DeepSpeed Ulysses: system optimizations for enabling training of extreme long sequence
transformer models" (2023); Fang and Zhao, "USP: a unified sequence parallelism approach for long context generative AI"
(2024).
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch

from hpctrain import comm
from hpctrain.grid import Axis
from hpctrain.layers.context.dropout import DropoutMasks
from hpctrain.layers.context.heads import Heads, head_groups, kv_heads, query_heads
from hpctrain.layers.context.mask import Mask
from hpctrain.layers.context.ring import RingAttention
from hpctrain.layers.context.spans import Spans, merged, span_length
from hpctrain.once_differentiable import once_differentiable

TILED = range(512, 1025)  # tokens; forward and backward take 0.75 to 0.95 of torch's time, as long or longer outside


@dataclass(frozen=True)
class Context:
    """What attention needs to know beside its tensors; alike on all ranks of the two axes.

    Attributes:
        ring, ulysses: the axes that sequences are cut over.
        spans: positions that each sequence rank holds, as `sequence_spans` gives them.
        masks: for each sequence of the call, who sees whom.
        scale: of the scores.
        dropout: of the probabilities.
    """

    ring: Axis
    ulysses: Axis
    spans: tuple[Spans, ...]
    masks: tuple[Mask, ...]
    scale: float
    dropout: DropoutMasks | None = None


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: Context) -> torch.Tensor:
    """Attention of the local tokens, (sequences, heads, tokens, width), to all tokens of their sequences. k and v may
    have fewer heads, a divisor of those of q. Collective, and so is backward."""
    return _Attend.apply(q, k, v, context)


def tiles_pay(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether causal attention of whole sequences is quicker by `attend` than by torch's fused kernel alone. On a CPU
    this computes scores of 512 keys at a time, the masked ones too: at 512 tokens twice what is seen."""
    alike = k.shape == v.shape and (len(q), *q.shape[2:]) == (len(k), *k.shape[2:])
    return q.is_cpu and alike and q.numel() > 0 and q.shape[2] in TILED


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, context):
        layout = _layout(context.spans, context.ring.size, context.ring.rank, context.ulysses.size,
                         context.ulysses.rank, q.shape[1], k.shape[1])  # fmt: skip
        exchange = comm.workspace(context.ulysses, q, "attention")
        q, kv = exchange.rows_to_slices([q, torch.cat((k, v))], layout.tokens, layout.heads)
        q, kv = q.contiguous(), kv.unflatten(0, (2, len(q)))
        ring = RingAttention(
            context.ring, layout.spans, layout.length, _alike(context.masks), layout.groups, context.scale,
            context.dropout, layout.first_head, layout.gather,
        )  # fmt: skip
        found = ring.forward(q, kv)
        out = found.out.to(q.dtype)
        if any(ctx.needs_input_grad):
            ctx.layout, ctx.exchange, ctx.ring = layout, exchange, ring
            ctx.save_for_backward(q, kv, out, found.lse)
        (attended,) = exchange.slices_to_rows([out], layout.tokens, layout.heads[:1])
        return attended

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        layout, exchange = ctx.layout, ctx.exchange
        q, kv, out, lse = ctx.saved_tensors
        (grad,) = exchange.rows_to_slices([grad], layout.tokens, layout.heads[:1])
        dq, dkv = ctx.ring.backward(q, kv, out, lse, grad)
        parts = [dq.to(q.dtype), dkv.to(kv.dtype).flatten(0, 1)]
        del dq, dkv, grad  # before what is given is made
        dq, dkv = exchange.slices_to_rows(parts, layout.tokens, layout.heads)
        return dq, *dkv.chunk(2), None


@dataclass(frozen=True)
class _Layout:
    """Attributes: `spans` of the ring ranks; `tokens` of the Ulysses ranks of this one; `heads` of queries, and of keys
    and values, that each Ulysses rank works on; of this rank's heads, `groups` and the number of the first; `gather`:
    see `gathers`."""

    spans: tuple[Spans, ...]
    length: int
    tokens: tuple[int, ...]
    heads: tuple[list[slice], list[slice]]
    groups: tuple[Heads, ...]
    first_head: int
    gather: bool


@functools.lru_cache(maxsize=256)
def _layout(spans, ring, ring_rank, ulysses, ulysses_rank, heads, groups) -> _Layout:
    of_ring = [spans[rank * ulysses : (rank + 1) * ulysses] for rank in range(ring)]
    joined = tuple(merged(span for part in parts for span in part) for parts in of_ring)
    queries, keys = query_heads(heads, ulysses), kv_heads(heads, groups, ulysses)
    mine = queries[ulysses_rank]
    return _Layout(
        joined, sum(map(span_length, joined)), tuple(map(span_length, of_ring[ring_rank])), (queries, keys),
        tuple(head_groups(mine, keys[ulysses_rank], heads // max(1, groups))), mine.start,
        gathers(ring, mine.stop - mine.start, keys[ulysses_rank].stop - keys[ulysses_rank].start),
    )  # fmt: skip


def gathers(ring: int, heads: int, kv_heads: int) -> bool:
    """Whether keys and values that go by messages come all at once: where those of the whole sequence are no more than
    a rank's queries. Hop by hop, each has two blocks of them in memory, and the next comes while one is worked on.

    >>> gathers(4, heads=32, kv_heads=8), gathers(8, heads=32, kv_heads=8)
    (True, False)
    """
    return ring * kv_heads <= heads


def _alike(masks):
    """Runs of sequences with the same mask."""
    found, start = [], 0
    for mask, run in itertools.groupby(masks):
        stop = start + sum(1 for _ in run)
        found.append((slice(start, stop), mask))
        start = stop
    return tuple(found)
