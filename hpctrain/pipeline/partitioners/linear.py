"""Partition by integer linear programming."""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from hpctrain.pipeline.partitioners.dynamic import optimum
from hpctrain.pipeline.partitioners.problem import Problem

NODES = 300  # of the search tree; a limit in seconds could give each rank another answer


def linear(problem: Problem, limit: float) -> list[int] | None:
    """The partition with the least `objective` of those of which no stage alone needs more than `limit` bytes, or the
    least found in `NODES` nodes: many layers in several stages a rank take more. None if none is found.

    Binary variables y[s, l] say whether layer l is in stage s or a later one, so that y[s, l] - y[s + 1, l] assigns
    layer l to stage s, and y[s, l] - y[s, l - 1] is 1 where stage s begins. One more variable is the slowest rank's
    time.

    Solved by `scipy.optimize.milp` (HiGHS).
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    layers, stages = problem.layers, problem.stages
    unit = max(problem.times) or 1.0  # the solver's tolerances are absolute
    times, boundary = np.array(problem.times) / unit, np.array(problem.boundary) / unit
    # y has a row for every stage, the first one full of ones, and one of zeros behind the last
    number = np.arange((stages + 1) * layers).reshape(stages + 1, layers)
    size = number.size + 1
    rows, most = [], []

    def at_most(bound, *terms):
        """One constraint: the sum of weights × variables."""
        row = np.zeros(size)
        for weights, variables in terms:
            np.add.at(row, variables, weights)
        rows.append(row)
        most.append(bound)

    low, high = np.zeros(size), np.ones(size)
    low[number[0]], high[number[stages]] = 1, 0
    high[number[1:, 0]], low[number[:-1, -1]] = 0, 1
    low[-1], high[-1] = _slowest(problem) / unit, np.inf
    for s in range(stages):
        for layer in range(layers - 1):
            at_most(0, (1, number[s, layer]), (-1, number[s, layer + 1]))  # no stage again after a later one
            at_most(0, (1, number[s + 1, layer + 1]), (-1, number[s, layer]))  # each has at least one layer
        if limit < np.inf:
            need = np.array(problem.bytes(s)) / (limit or 1.0)
            at_most(float(limit > 0), (need, number[s]), (-need, number[s + 1]))
    for own in problem.ranks():
        terms = [term for s in own for term in ((times, number[s]), (-times, number[s + 1]))]
        at_most(0, *terms, (-problem.replicas, size - 1))
    cost = np.zeros(size)
    cost[number[1:stages]] = boundary[:-1] - boundary[1:]
    cost[-1] = problem.rounds
    result = milp(
        cost,
        integrality=np.r_[np.ones(size - 1), 0],
        bounds=Bounds(low, high),
        constraints=LinearConstraint(np.array(rows), ub=np.array(most)),
        options={"mip_rel_gap": 0, "node_limit": NODES},
    )
    if result.x is None:
        return None
    reached = np.rint(result.x[:-1]).reshape(stages + 1, layers).sum(1)
    return [int(here - later) for here, later in zip(reached, reached[1:])]


def _slowest(problem: Problem) -> float:
    """No partition has a faster slowest rank: without this the solver takes minutes to prove it of equal layers."""
    counts = optimum(problem.layers, problem.stages, lambda stage, start, stop: problem.time(start, stop), max)
    assert counts is not None  # there are layers enough
    ends = list(accumulate(counts, initial=0))
    stage = max(problem.time(*each) for each in zip(ends, ends[1:]))
    return max(stage / problem.replicas, sum(problem.times) / len(problem.ranks()))
