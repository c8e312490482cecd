"""Improve partitions by what the simulator says of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import takewhile

from hpctrain.pipeline.partitioners.problem import Problem, Verdict

WORK = 1_000_000  # actions simulated for one partition, about ten seconds; the same on every machine
STARTS = 4


def improved(problem: Problem, candidates: list[list[int]], value: Callable[[Verdict], tuple]) -> list[int]:
    """The best that is reached from the best few candidates by moving layers from one stage to another, one at a time,
    while the verdict's value gets less.
    """

    def judged(counts):
        return value(problem.judge(counts))

    starts = sorted(map(list, {tuple(counts): None for counts in candidates}), key=judged)[:STARTS]
    reached: list[list[int]] = []
    for start in starts:
        near: list[int] | None = start
        while near is not None:
            counts = near
            affordable = takewhile(lambda _: problem.simulated < WORK, _moves(counts))
            near = min((moved for moved in affordable if judged(moved) < judged(counts)), key=judged, default=None)
        reached.append(counts)
    return min(reached, key=judged)


def _moves(counts: list[int]) -> Iterator[list[int]]:
    """One layer fewer in one stage and one more in another: what lies between is shifted."""
    for giver in range(len(counts)):
        for taker in range(len(counts)):
            if giver != taker and counts[giver] > 1:
                moved = list(counts)
                moved[giver] -= 1
                moved[taker] += 1
                yield moved
