"""All partitioners by name."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hpctrain.given import check_types
from hpctrain.pipeline.partitioners.costs import LayerCosts
from hpctrain.pipeline.partitioners.dynamic import dynamic, leanest
from hpctrain.pipeline.partitioners.problem import Problem
from hpctrain.pipeline.partitioners.search import improved
from hpctrain.pipeline.registry import schedule as schedule_of
from hpctrain.pipeline.synchronous import at_least_one
from hpctrain.shard import split_sizes

METHODS = ("even", "dp", "lp", "rl")


def partition(
    method: str | Sequence[int],
    costs: LayerCosts,
    ranks: int,
    microbatches: int,
    *,
    stages: int | None = None,
    schedule: str = "1f1b",
    latency: float = 0.0,
    bandwidth: float = math.inf,
    memory: float | None = None,
    seed: int = 0,
) -> list[int]:
    """Numbers of consecutive layers of the stages. The same arguments give the same numbers.

    Args:
        method: "even": as `shard.split`.
            "dp": dynamic programming by formula, then layers moved one by one as long as the simulator gains.
            "lp": integer linear programming by the same formula.
            "rl": the best by the simulator of all that a policy draws while it learns.
            Or the numbers themselves, which are checked.
        costs: of the layers.
        ranks, microbatches, schedule: as of `pipeline.schedule`.
        stages: ranks × virtual_stages of the schedule; what the schedule has by itself if not given.
        latency, bandwidth: of a message; bytes per unit of time, in the unit of the costs.
        memory: bytes a rank has for weights, activations and messages that wait, as the simulator counts them.
        seed: of "rl".

    Raises:
        ValueError: naming the option, what it got and what would do; fewer layers than stages, numbers that do not
            make up the layers, too little memory.

    >>> costs = LayerCosts(forward=[4, 1, 1, 1, 1, 1], input_gradient=[4, 1, 1, 1, 1, 1])
    >>> partition("even", costs, ranks=3, microbatches=8), partition("dp", costs, ranks=3, microbatches=8)
    ([2, 2, 2], [1, 2, 3])
    """
    problem = _problem(costs, ranks, microbatches, stages, schedule, latency, bandwidth, memory)
    even = list(split_sizes(problem.layers, problem.stages))
    if not isinstance(method, str):
        return _fitting(problem, check_counts(method, problem.layers, problem.stages))
    if method not in METHODS:
        raise ValueError(f"partition={method!r}: use one of {', '.join(METHODS)}, or list the layers of each stage")
    if method == "even":
        return _fitting(problem, even)
    found = [even] if memory is None else [even, _leanest(problem, even)]
    if method == "dp":
        return improved(problem, found + dynamic(problem), lambda verdict: verdict[:2])
    if method == "lp":
        found += _linear(problem)
    else:
        from hpctrain.pipeline.partitioners.reinforce import reinforce  # brings numpy

        found += reinforce(problem, seed)
    return min(found, key=lambda counts: problem.judge(counts)[:2])


def score(
    counts: Sequence[int],
    costs: LayerCosts,
    ranks: int,
    microbatches: int,
    *,
    stages: int | None = None,
    schedule: str = "1f1b",
    latency: float = 0.0,
    bandwidth: float = math.inf,
) -> float:
    """The simulated time of a step with `counts` layers in the stages; the other arguments as of `partition`."""
    problem = _problem(costs, ranks, microbatches, stages, schedule, latency, bandwidth, None)
    return problem.judge(check_counts(counts, problem.layers, problem.stages)).makespan


def check_counts(counts: Sequence[int], layers: int, stages: int) -> list[int]:
    """The numbers as a list.

    >>> check_counts([3, 2], layers=6, stages=2)
    Traceback (most recent call last):
    ValueError: pipeline.partition=[3, 2]: 2 numbers of at least 1 are wanted whose sum is 6, as [3, 3]
    """
    counts = list(counts)
    good = all(isinstance(count, int) and count > 0 for count in counts)
    if not good or len(counts) != stages or sum(counts) != layers:
        raise ValueError(
            f"pipeline.partition={counts}: {stages} numbers of at least 1 are wanted whose sum is {layers}, "
            f"as {list(split_sizes(layers, stages))}"
        )
    return counts


def _problem(costs, ranks, microbatches, stages, schedule, latency, bandwidth, memory) -> Problem:
    check_types(costs=(costs, LayerCosts))
    at_least_one(ranks=ranks)
    if stages is not None and stages % ranks:
        raise ValueError(f"stages={stages} is not a multiple of ranks={ranks}; use {max(1, stages // ranks) * ranks}")
    chosen = schedule_of(schedule, ranks, microbatches, None if stages is None else stages // ranks)
    if len(costs) < chosen.graph.stages:
        raise ValueError(
            f"{len(costs)} layers cannot fill the {chosen.graph.stages} stages of {schedule} on {ranks} ranks; "
            f"use fewer ranks or virtual_stages, or {chosen.graph.stages} layers"
        )
    return Problem(costs, chosen, latency, bandwidth, math.inf if memory is None else memory)


def _fitting(problem: Problem, counts: list[int]) -> list[int]:
    verdict = problem.judge(counts)
    if verdict.excess:
        raise ValueError(
            f"memory={problem.limit:g}: partition {counts} needs {verdict.peak:g} bytes on a rank; "
            'give as many, or use partition = "dp"'
        )
    return counts


def _leanest(problem: Problem, even: list[int]) -> list[int]:
    """The partition that needs the least memory."""
    lean = improved(problem, [even, leanest(problem)], lambda verdict: (verdict.peak,))
    verdict = problem.judge(lean)
    if verdict.excess:
        raise ValueError(
            f"memory={problem.limit:g}: no partition of {problem.layers} layers into {problem.stages} stages fits; "
            f"the least that would do is {verdict.peak:g} bytes a rank, with {lean}"
        )
    return lean


def _linear(problem: Problem) -> list[list[int]]:
    """The program knows nothing of messages that wait: what they need is taken from its limit."""
    from hpctrain.pipeline.partitioners.linear import linear  # brings numpy

    limit = problem.limit
    while limit >= 0 and (counts := linear(problem, limit)):
        excess = problem.judge(counts).excess
        if not excess:
            return [counts]
        limit -= excess
    return []
