"""What a comparison keeps of two sides that were timed in turn, and what follows from it."""

import random
import statistics

RESAMPLES = 2000


def compared(ours, theirs):
    """The members of a line: the ratio, and the seconds of both sides, pair by pair. Above 1, ours is faster.

    >>> compared([1.0, 2.0, 4.0], [2.0, 2.2, 4.0])
    {'ratio': 1.1, 'ours_samples': [1.0, 2.0, 4.0], 'theirs_samples': [2.0, 2.2, 4.0]}
    """
    ratio = statistics.median(b / a for a, b in zip(ours, theirs))
    samples = ([float(f"{value:.4g}") for value in side] for side in (ours, theirs))
    return {"ratio": round(ratio, 3), **dict(zip(("ours_samples", "theirs_samples"), samples))}


def interval(ratios):
    """Bounds of the median of the ratios: 95 of 100 medians of as many drawn from them lie within (bootstrap).

    >>> interval([1.0] * 5), interval([0.9, 1.0, 1.1, 1.2, 1.3])
    ((1.0, 1.0), (0.9, 1.3))
    """
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return medians[RESAMPLES // 40], medians[-RESAMPLES // 40 - 1]
