"""Samples of several sources in given proportions, in an order that is a function of the seed alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from hpctrain.data.order import SampleOrder

PERIOD = 2**16  # samples at most after which the pattern of sources begins anew


class MixedOrder:
    """An endless sequence of samples, each source's in its own order. The sources follow a fixed pattern, in which each
    is spread evenly: of any n samples from the first on, a source has its part to within (sources / 2 + 1) of them.

    Args:
        orders: of the sources.
        weights: of the sources; their sum is 1, or is made so.
        firsts: numbers of the sources' first samples, by which they are known.

    Attributes: `samples`, of all sources.

    >>> from hpctrain.randomness import RngKey
    >>> order = MixedOrder([SampleOrder(9, RngKey(0, name)) for name in "ab"], [0.75, 0.25], [0, 100])
    >>> (order[0:8] >= 100).tolist(), order.taken(8)
    ([False, False, True, False, False, False, True, False], [6, 2])
    """

    def __init__(self, orders: Sequence[SampleOrder], weights: Sequence[float], firsts: Sequence[int]):
        self.orders, self.firsts = orders, firsts
        self.counts = period_counts(weights)
        places = np.concatenate([(np.arange(count) + 0.5) / count for count in self.counts])
        sources = np.repeat(np.arange(len(orders)), self.counts)
        by_place = np.argsort(places, kind="stable")
        self._source = sources[by_place]
        self._rank = np.concatenate([np.arange(count) for count in self.counts])[by_place]
        self.samples = sum(order.samples for order in orders)

    def __getitem__(self, positions: slice) -> np.ndarray:
        """Numbers of the samples at positions `start` to `stop` of the sequence."""
        periods, places = np.divmod(np.arange(positions.start, positions.stop), len(self._source))
        sources, ranks = self._source[places], self._rank[places]
        out = np.empty(len(places), np.int64)
        for source, order in enumerate(self.orders):
            chosen = sources == source
            out[chosen] = self.firsts[source] + order.at(periods[chosen] * self.counts[source] + ranks[chosen])
        return out

    def taken(self, count: int) -> list[int]:
        """How many of the first `count` samples are of each source."""
        periods, rest = divmod(count, len(self._source))
        begun = np.bincount(self._source[:rest], minlength=len(self.orders)).tolist()
        return [periods * each + some for each, some in zip(self.counts, begun)]


def period_counts(weights: Sequence[float]) -> list[int]:
    """Whole numbers in the proportion of the weights, exact where their sum need not be above PERIOD.

    Raises:
        ValueError: for a weight so small that its source would never come.

    >>> period_counts([0.7, 0.3]), period_counts([1, 1, 1]), sum(period_counts([math.pi, 1]))
    ([7, 3], [1, 1, 1], 65536)
    """
    exact = [Fraction(str(weight)) for weight in weights]
    parts = [part / sum(exact) for part in exact]
    period = math.lcm(*(part.denominator for part in parts))
    if period > PERIOD:
        period = PERIOD
    counts = [math.floor(part * period) for part in parts]
    by_rest = sorted(range(len(parts)), key=lambda n: counts[n] - parts[n] * period)
    for number in by_rest[: period - sum(counts)]:  # the largest remainders
        counts[number] += 1
    if min(counts) < 1:
        raise ValueError(f"weights must be at least 1 / {PERIOD} of their sum, got {list(weights)}")
    return counts
