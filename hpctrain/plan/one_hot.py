"""One choice for each node of a graph, so that nodes and edges cost the least together: an integer linear program."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class OneHot:
    """The graph.

    Attributes:
        costs: of each node, those of its choices; infinite where there is no such choice.
        edges: {(u, v): costs by u's choice and v's}, between different nodes; circles are allowed.
        memory: of each node, what its choices need.
        limit: of the memory of all nodes.
    """

    costs: Sequence[np.ndarray]
    edges: Mapping[tuple[int, int], np.ndarray] = field(default_factory=dict)
    memory: Sequence[np.ndarray] = ()
    limit: float = math.inf

    def cost(self, choices: Sequence[int]) -> float:
        nodes = sum(float(costs[choice]) for costs, choice in zip(self.costs, choices))
        return nodes + sum(float(costs[choices[u], choices[v]]) for (u, v), costs in self.edges.items())

    def needs(self, choices: Sequence[int]) -> float:
        return sum(float(each[choice]) for each, choice in zip(self.memory, choices))

    def best(self) -> list[int] | None:
        """The choices of least cost of those whose memory is at most the limit; None where there are none.

        A binary s says for each choice whether it is made. Of an edge, e[i, j] says whether both ends made theirs, i
        and j: the sums of its rows are the s of u and those of its columns the s of v, which keeps it from being a
        fraction where s is none, so that it needs to be no integer itself.

        Solved by `scipy.optimize.milp` (HiGHS).

        Source: Zheng et al., "Alpa: automating inter- and intra-operator parallelism for distributed deep learning"
        (OSDI 2022), §4.2, whose products of binaries are made linear so.
        """
        if self.limit < 0:
            return None
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array

        sizes = [len(costs) for costs in self.costs]
        first = np.cumsum([0, *sizes])
        every = np.concatenate([*map(np.asarray, self.costs), *(np.ravel(costs) for costs in self.edges.values())])
        binaries, count = first[-1], len(every)
        rows: list[np.ndarray] = []
        columns: list[np.ndarray] = []
        values: list[np.ndarray] = []
        bounds: list[float] = []

        def equal(bound, indices, weights):
            rows.append(np.full(len(indices), len(bounds)))
            columns.append(np.asarray(indices))
            values.append(np.broadcast_to(np.asarray(weights, float), len(indices)))
            bounds.append(bound)

        for start, size in zip(first, sizes):
            equal(1, np.arange(start, start + size), 1)
        at = binaries
        for (u, v), costs in self.edges.items():
            number = np.arange(at, at + costs.size).reshape(costs.shape)
            at += costs.size
            for i, of_row in enumerate(number):
                equal(0, [*of_row, first[u] + i], [1] * len(of_row) + [-1])
            for j, of_column in enumerate(number.T):
                equal(0, [*of_column, first[v] + j], [1] * len(of_column) + [-1])
        equalities = len(bounds)
        if self.limit < math.inf:
            unit = self.limit or 1.0  # the solver's tolerances are absolute
            equal(float(self.limit > 0), np.arange(binaries), np.concatenate(self.memory) / unit)
        matrix = coo_array((np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))),
                           shape=(len(bounds), count))  # fmt: skip
        least = np.array(bounds, float)
        least[equalities:] = -np.inf
        allowed = np.isfinite(every)
        scale = np.abs(every[allowed]).max(initial=0) or 1.0
        result = milp(
            np.where(allowed, every, 0) / scale,
            integrality=np.r_[np.ones(binaries), np.zeros(count - binaries)],
            bounds=Bounds(0, allowed.astype(float)),
            constraints=LinearConstraint(matrix.tocsr(), least, bounds),
            options={"mip_rel_gap": 0},
        )
        if result.x is None:
            return None
        return [int(result.x[start : start + size].argmax()) for start, size in zip(first, sizes)]
