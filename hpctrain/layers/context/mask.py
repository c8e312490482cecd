"""Which keys a query attends to, as a rule that is never written out: causality, a sliding window, documents."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True)
class Mask:
    """The rule for one sequence, in positions of the whole sequence.

    Attributes:
        causal: a query sees no later key.
        window: it sees only keys fewer than so many positions away, itself one of them; 0 for no bound.
        documents: lengths of the documents that are packed one after the other; a query sees only its own. () for one
            document of any length.
    """

    causal: bool = True
    window: int = 0
    documents: tuple[int, ...] = ()

    def document_ranges(self, length: int) -> list[range]:
        """Positions of each document of a sequence of `length`.

        >>> Mask(documents=(2, 3)).document_ranges(5)
        [range(0, 2), range(2, 5)]
        """
        ends = list(itertools.accumulate(self.documents or (length,)))
        if ends[-1] != length or min(self.documents, default=1) < 1:
            raise ValueError(f"documents must be lengths of at least 1 whose sum is {length}, got {self.documents}")
        return [range(start, stop) for start, stop in zip([0, *ends], ends)]

    @property
    def offsets(self) -> tuple[int | None, int | None]:
        """The least and greatest key - query that is seen within a document; None for no bound."""
        least = 1 - self.window if self.window else None
        if self.causal:
            return least, 0
        return least, None if least is None else -least

    def pairs(self, queries: range, keys: range) -> int:
        """How many (query, key) of one document see each other.

        >>> Mask().pairs(range(4), range(4)), Mask(window=2).pairs(range(4), range(4))
        (10, 7)
        >>> Mask(causal=False, window=2).pairs(range(4), range(4)), Mask(causal=False).pairs(range(4), range(1, 3))
        (10, 8)
        """
        return band_pairs(queries, keys, *self.offsets)

    def work(self, part: range, ranges: list[range]) -> int:
        """Pairs whose query is in `part`, of a sequence of these document ranges."""
        if not part:
            return 0
        first = bisect_right(ranges, part.start, key=lambda document: document.start) - 1
        last = bisect_right(ranges, part.stop - 1, key=lambda document: document.start)
        return sum(self.pairs(overlap(part, document), document) for document in ranges[first:last])


def overlap(first: range, second: range) -> range:
    """
    >>> overlap(range(0, 5), range(3, 9)), len(overlap(range(0, 2), range(3, 9)))
    (range(3, 5), 0)
    """
    return range(max(first.start, second.start), min(first.stop, second.stop))


def band_pairs(queries: range, keys: range, least: int | None, greatest: int | None) -> int:
    """How many (query, key) have least <= key - query <= greatest; None for no bound."""
    seen = len(queries) * len(keys) if greatest is None else _at_most(queries, keys, greatest)
    return seen if least is None else seen - _at_most(queries, keys, least - 1)


def _at_most(queries, keys, offset):
    """Pairs with key - query <= offset."""
    if not queries or not keys:
        return 0
    shift = offset + 1 - keys.start  # query q sees the first q + shift keys, at least none and at most all
    return _sum_of_clipped(queries.stop + shift, len(keys)) - _sum_of_clipped(queries.start + shift, len(keys))


def _sum_of_clipped(stop, most):
    """Sum of min(n, most) over n of range(stop)."""
    if stop <= 0:
        return 0
    below = min(stop, most)
    return below * (below - 1) // 2 + (stop - below) * most
