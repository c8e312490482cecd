"""The stage graph: which stage's output goes to which stage."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1}


@dataclass(frozen=True)
class Edge:
    """A tensor of one microbatch that `source` gives to `target`; its gradient goes back along the same edge.

    >>> Edge(0, 1, (8, 128), "bfloat16").bytes
    2048
    """

    source: int
    target: int
    shape: tuple[int, ...] = (0,)
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZE:
            raise ValueError(f"dtype of an edge must be one of {', '.join(ITEMSIZE)}, got {self.dtype!r}")

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


class StageGraph:
    """A directed acyclic graph of stages: branches, skips and joins are ordinary edges.

    Args:
        stages: how many; they are numbered from 0, in any order.
        edges: `Edge` objects, or pairs (source, target).

    Attributes:
        into[s], out[s]: the edges that end and start at stage s, as (number of the edge, stage at its other end).
        sorted: the stages so that every edge leads from an earlier to a later one, the lowest number first where there
            is a choice: the order in which one rank without a schedule would go through them.

    Raises:
        ValueError: for an edge to no stage, two edges between the same stages, or a cycle.

    >>> diamond = StageGraph(4, [(0, 1), (0, 2), (1, 3), (2, 3)])
    >>> diamond.into[3]
    [(2, 1), (3, 2)]
    """

    def __init__(self, stages: int, edges: Iterable[Edge | tuple[int, int]] = ()):
        if stages < 1:
            raise ValueError(f"a stage graph needs at least one stage, got stages={stages}")
        self.stages = stages
        self.edges = tuple(edge if isinstance(edge, Edge) else Edge(*edge) for edge in edges)
        self.into: list[list[tuple[int, int]]] = [[] for _ in range(stages)]
        self.out: list[list[tuple[int, int]]] = [[] for _ in range(stages)]
        seen = set()
        for number, edge in enumerate(self.edges):
            ends = edge.source, edge.target
            if not all(0 <= end < stages for end in ends):
                raise ValueError(f"edge {ends} leaves the stages 0 … {stages - 1}")
            if ends in seen:
                raise ValueError(f"two edges {ends}; send both tensors as one, or put a stage between")
            seen.add(ends)
            self.into[edge.target].append((number, edge.source))
            self.out[edge.source].append((number, edge.target))
        self.sorted = self._sort()

    @classmethod
    def chain(cls, stages: int, shape: tuple[int, ...] = (0,), dtype: str = "float32") -> StageGraph:
        """Stage s gives its output to stage s + 1; edge s joins them."""
        return cls(stages, [Edge(s, s + 1, shape, dtype) for s in range(stages - 1)])

    def _sort(self) -> tuple[int, ...]:
        missing = [len(into) for into in self.into]
        ready = [s for s in range(self.stages) if not missing[s]]
        done = []
        while ready:
            done.append(heapq.heappop(ready))
            for _, target in self.out[done[-1]]:
                missing[target] -= 1
                if not missing[target]:
                    heapq.heappush(ready, target)
        if len(done) < self.stages:
            raise ValueError(f"the stages {sorted(set(range(self.stages)) - set(done))} are in or behind a cycle")
        return tuple(done)
