"""Dropout masks of attention probabilities, any part of them, as one rank would draw them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hpctrain.layers.context.spans import Spans, span_length
from hpctrain.randomness import RngKey, drop_threshold

WORTH = 8  # numbers drawn one after another that cost as much as one drawn by itself, roughly, at a thousand of a row


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
        numbers = [
            (sequence * self.heads + self.first_head + head) * self.length
            for sequence in self.sequences[sequences]
            for head in range(heads.start, heads.stop)
        ]
        rows = [self._rows(number + span.start, len(span), keys) for number in numbers for span in queries]
        keep = torch.cat(rows).view(-1, heads.stop - heads.start, span_length(queries), span_length(keys))
        return keep.to(like.device, like.dtype) / (1 - drop_threshold(self.p) / 2**16)

    def _rows(self, first, count, keys):
        """Of `count` rows from row `first` of all on, the columns of `keys`."""
        length = self.length
        if WORTH * span_length(keys) > length:
            whole = self.key.mask(first * length, count * length, self.p, self.step).view(count, length)
            return torch.cat([whole[:, span.start : span.stop] for span in keys], 1)
        return torch.stack([self._row(row * length, keys) for row in range(first, first + count)])

    def _row(self, start, keys):
        return torch.cat([self.key.mask(start + span.start, len(span), self.p, self.step) for span in keys])
