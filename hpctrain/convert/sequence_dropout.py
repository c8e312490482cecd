"""Dropout where ranks share sequences: the masks that one rank would draw.

Every rank draws them whole from torch's generator, and keeps what is of its tokens; see `dropout.kept`. For that a
byte an element is needed for a moment, of a whole sequence, or in attention of all its pairs of tokens and heads; on a
GPU two elements besides.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import nn

from hpctrain.convert.dropout import kept, scaled, whole_mask
from hpctrain.convert.plain import is_one_of, is_plain
from hpctrain.layers.context.attention import Context
from hpctrain.layers.context.heads import query_heads
from hpctrain.layers.context.spans import Spans, merged, span_length

if TYPE_CHECKING:
    from hpctrain.convert.plan import Plan

# A type, and its members: dropout of (batch, tokens, features), and of attention, which asks it for its probability.
OF_TOKENS = {"GPT2Model": "drop", "GPT2Attention": "resid_dropout", "GPT2MLP": "dropout"}
OF_ATTENTION = {"GPT2Attention": "attn_dropout"}


@dataclasses.dataclass
class CurrentSpans:
    """Positions of the sequences that a model works on now: `spans` of the ranks, of which this one is `rank`."""

    rank: int
    spans: tuple[Spans, ...] = ()


class CutDropout(nn.Dropout):
    """Mixin for nn.Dropout of (batch, tokens, features) of which a rank has some tokens.

    Attributes: `current`, of the model.
    """

    current: CurrentSpans

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training or self.p == 0:
            return input
        mine = positions(self.current.spans[self.current.rank])
        shape = len(input), sum(span_length(spans) for spans in self.current.spans), input.shape[2]
        keep = kept(shape, self.p, 1, mine.to(input.device), input, self.inplace)
        return scaled(input, keep, self.p, self.inplace)


@dataclasses.dataclass(frozen=True)
class DrawnMask:
    """Which probabilities of attention are kept, of all that this rank computes.

    Attributes:
        p: probability to be dropped.
        keep: booleans (sequences, heads, queries, keys), of whole sequences of keys.
        first_head: number of the first of the heads.
        queries: their positions, ascending.
    """

    p: float
    keep: torch.Tensor
    first_head: int
    queries: torch.Tensor

    def factors(self, sequences: slice, heads: slice, queries: Spans, keys: Spans, like: torch.Tensor) -> torch.Tensor:
        """As of `layers.context.dropout.DropoutMasks`."""
        keep = self.keep[sequences, heads.start - self.first_head : heads.stop - self.first_head]
        rows = torch.searchsorted(self.queries, positions(queries))
        part = keep[:, :, rows.to(keep.device)][..., positions(keys).to(keep.device)].to(like.dtype)
        return part if self.p == 1 else part / (1 - self.p)


def drawn_mask(query: torch.Tensor, p: float, context: Context, heads: int, part: slice) -> DrawnMask:
    """Of one call of attention.

    Args:
        query: (sequences, this rank's heads, its tokens, width).
        part: this rank's of all `heads` before Ulysses exchanges them; where it is empty, whatever `query` has is zero.
    """
    length = sum(map(span_length, context.spans))
    first = part.start if part.stop > part.start else 0
    mine = query_heads(query.shape[1], context.ulysses.size)[context.ulysses.rank]
    of_ring = context.ring.rank * context.ulysses.size
    rows = positions(merged(span for spans in context.spans[of_ring:][: context.ulysses.size] for span in spans))
    keep = whole_mask((len(query), heads, length, length), p, query)
    keep = keep[:, first + mine.start : first + mine.stop, rows.to(query.device)]
    return DrawnMask(p, keep, mine.start, rows)


def positions(spans: Spans) -> torch.Tensor:
    """One after the other.

    >>> positions((range(2, 4), range(6, 7)))
    tensor([2, 3, 6])
    """
    return torch.cat([torch.arange(0), *(torch.arange(span.start, span.stop) for span in spans)])


def use_whole_masks(plan: Plan, model: nn.Module, current: CurrentSpans) -> None:
    """Let the dropout of OF_TOKENS draw what one rank would."""
    for module in members(model, OF_TOKENS):
        plan.swap_class(module, CutDropout, current=current)
    for module in model.modules():
        if is_one_of(module, OF_ATTENTION):
            plan.change(module, current=current)


def members(model: nn.Module, of: dict[str, str]) -> set[nn.Module]:
    """Those that are nothing but nn.Dropout."""
    found = {getattr(m, of[type(m).__name__]) for m in model.modules() if is_one_of(m, of)}
    return {module for module in found if is_plain(module, nn.Dropout)}
