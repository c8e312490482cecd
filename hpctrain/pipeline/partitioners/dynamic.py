"""Partition by dynamic programming over the ends of the stages."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from itertools import accumulate

from hpctrain.pipeline.partitioners.problem import Problem


def dynamic(problem: Problem) -> list[list[int]]:
    """The partition of the least `objective` (where no rank has two stages), and those seen on the way to it.

    Under a bound on the time of the slowest stage, dynamic programming finds the least time in messages. The bounds are
    bisected; a range of them is left out where its least bound and the fewest messages together are no better than
    what was found. With several stages a rank, the slowest stage stands for the slowest rank.

    Source: Zheng et al., "Alpa" (OSDI 2022), §5.2, to whose sum the messages are added.
    """
    bytes_until = [list(accumulate(problem.bytes(stage), initial=0.0)) for stage in range(problem.stages)]
    ends = range(problem.layers + 1)
    bounds = sorted({problem.time(start, stop) for stop in ends for start in range(stop)})
    weight = problem.rounds * problem.turns
    found: list[list[int]] = []
    best = math.inf

    def messages(bound: float) -> tuple[float, float]:
        nonlocal best

        def cost(stage, start, stop):
            fits = bytes_until[stage][stop] - bytes_until[stage][start] <= problem.limit
            return problem.boundary[stop] if fits and problem.time(start, stop) <= bound else math.inf

        counts = optimum(problem.layers, problem.stages, cost, operator.add)
        if counts is None:
            return math.inf, best
        found.append(counts)
        cuts = list(accumulate(counts, initial=0))
        least = sum(problem.boundary[end] for end in cuts)
        best = min(best, least + weight * max(problem.time(*stage) for stage in zip(cuts, cuts[1:])))
        return least, best

    bisect_bounds(bounds, weight, messages)
    return found


def bisect_bounds(bounds: Sequence[float], weight: float, under: Callable[[float], tuple[float, float]]) -> None:
    """Call `under` with bounds on the slowest stage until no other one can lead to less.

    Args:
        bounds: ascending.
        weight: what a step takes of the slowest stage's time, beside a sum.
        under: with a bound, the least sum, infinite where there is no partition; and the least step of all calls.
    """
    fewest, best = under(bounds[-1])
    open_ranges = [(-1, math.inf, len(bounds) - 1, fewest)]
    while open_ranges:
        low, most, high, fewest = open_ranges.pop()
        if high - low > 1 and most > fewest and fewest + weight * bounds[low + 1] < best:
            middle = (low + high) // 2
            least, best = under(bounds[middle])
            open_ranges += [(middle, least, high, fewest), (low, most, middle, least)]


def leanest(problem: Problem) -> list[int]:
    """The partition whose largest stage needs the fewest bytes."""
    until = [list(accumulate(problem.bytes(stage), initial=0.0)) for stage in range(problem.stages)]

    def cost(stage, start, stop):
        return until[stage][stop] - until[stage][start]

    found = optimum(problem.layers, problem.stages, cost, max)
    assert found is not None  # no stage's cost is infinite
    return found


def optimum(
    layers: int, stages: int, cost: Callable[[int, int, int], float], join: Callable[[float, float], float]
) -> list[int] | None:
    """The partition with the least cost(stage, start, stop), joined over the stages by `join`: a sum, or max.

    A stage of infinite cost is not allowed, nor is any longer one with the same start. None if there is no partition.
    """
    least, starts = [0.0] + [math.inf] * layers, []
    for stage in range(stages):
        then, start_of = [math.inf] * (layers + 1), [0] * (layers + 1)
        for start in range(stage, layers - (stages - stage) + 1):
            if least[start] == math.inf:
                continue
            # the last stage ends with the chain, the others leave a layer for each that follows
            for stop in range(start + 1, layers - (stages - stage - 1) + 1):
                one = cost(stage, start, stop)
                if one == math.inf:
                    break
                total = join(least[start], one)
                if total < then[stop]:
                    then[stop], start_of[stop] = total, start
        least = then
        starts.append(start_of)
    if least[layers] == math.inf:
        return None
    counts, stop = [], layers
    for start_of in reversed(starts):
        counts.append(stop - start_of[stop])
        stop = start_of[stop]
    return counts[::-1]
