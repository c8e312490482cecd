"""Dropout masks of attention probabilities, any part of them, as one rank would draw them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hpctrain.layers.context.spans import Spans, span_length
from hpctrain.randomness import RngKey, drop_threshold


class DropoutMasks(Protocol):
    """Dropout masks of one call of attention."""

    def factors(self, sequences: slice, heads: slice, queries: Spans, keys: Spans, like: torch.Tensor) -> torch.Tensor:
        """What to multiply the probabilities by, 0 or 1 / (1 - p): (sequences, heads, queries, keys), where and of the
        dtype that `like` is."""


@dataclass(frozen=True)
class AttentionDropout:
    """Elements are numbered (sequence, head, query, key) through all sequences of the step, all heads, and whole
    sequences.

    Attributes:
        key: names the masks, which depend on `step`, too.
        p: probability to be dropped, rounded to a multiple of 2^-16.
        length, heads: of the whole sequence, and of the whole layer.
        sequences: numbers of those that attention is called with.
        first_head: number of the first head that it is called with.
    """

    key: RngKey
    p: float
    step: int
    length: int
    heads: int
    sequences: Sequence[int]
    first_head: int = 0

    def factors(self, sequences: slice, heads: slice, queries: Spans, keys: Spans, like: torch.Tensor) -> torch.Tensor:
        """What to multiply the probabilities by, 0 or 1 / (1 - p): (sequences, heads, queries, keys), where and of the
        dtype that `like` is."""
        count = len(self.sequences[sequences]), heads.stop - heads.start, span_length(queries), span_length(keys)
        rows = [self._rows(first, number, keys) for first, number in self._runs(sequences, heads, queries)]
        keep = torch.cat([torch.empty(0, count[-1], dtype=torch.bool, device="cpu"), *rows]).view(count)
        return keep.to(like.device, like.dtype) / (1 - drop_threshold(self.p) / 2**16)

    def _runs(self, sequences, heads, queries):
        """First row and number of rows, of (sequence, head, query), that follow each other."""
        for sequence in self.sequences[sequences]:
            first = (sequence * self.heads + self.first_head + heads.start) * self.length
            if queries == (range(self.length),):
                yield first, (heads.stop - heads.start) * self.length
                continue
            for head in range(heads.stop - heads.start):
                for span in queries:
                    yield first + head * self.length + span.start, len(span)

    def _rows(self, first, count, keys):
        """Of `count` rows from row `first` of all on, the columns of `keys`."""
        length = self.length
        parts = [
            self.key.mask_block(first * length + span.start, count, length, len(span), self.p, self.step)
            for span in keys
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
