"""What a partition is judged by: the time by formula, and time and memory by the simulator."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from hpctrain.pipeline.actions import BACKWARD, FORWARD, FREE, UPDATE, WEIGHT_GRADIENT, flat
from hpctrain.pipeline.graph import Edge, StageGraph
from hpctrain.pipeline.partitioners.costs import LayerCosts
from hpctrain.pipeline.schedules import Schedule
from hpctrain.pipeline.simulate import Costs, simulate


class Verdict(NamedTuple):
    """What the simulator says of a partition; the least of several is the best."""

    excess: float  # bytes above the limit on the worst rank
    makespan: float
    peak: float  # bytes on the worst rank


class Problem:
    """A chain of layers to be cut into the stages of a schedule. A partition lists the number of layers of each stage.

    Attributes:
        layers, stages: how many.
        rounds: microbatches but the first: as often the pipeline waits for its slowest rank.
        replicas: of each stage; they share the microbatches.
        turns: stages a rank works through for each microbatch.
        boundary[i]: time of the messages there and back when layer i begins a stage; 0 at both ends of the chain.
        limit: bytes a rank has.
    """

    def __init__(self, costs: LayerCosts, schedule: Schedule, latency: float = 0.0, bandwidth: float = math.inf,
                 limit: float = math.inf):  # fmt: skip
        Costs(latency=latency, bandwidth=bandwidth).tables(stages=1, slices=1)  # raises before they are used here
        self._costs, self._schedule, self._latency, self._bandwidth = costs, schedule, latency, bandwidth
        self._tasks = schedule.validate()
        self.layers, self.stages = len(costs), schedule.graph.stages
        self.rounds, self.limit = schedule.microbatches - 1, limit
        self.replicas = schedule.replicas
        self.turns = len(schedule.placement) / (schedule.replicas * schedule.ranks)
        self.boundary = [0.0, *(2 * (latency + size / bandwidth) for size in costs.message[:-1]), 0.0]
        self.times = [sum(each) for each in zip(costs.forward, costs.input_gradient, costs.weight_gradient)]
        self._until = [0.0, *accumulate(self.times)]
        self._in_flight = _in_flight(schedule)
        self._verdicts: dict[tuple[int, ...], Verdict] = {}

    @property
    def simulated(self) -> int:
        """Actions simulated so far."""
        return len(self._verdicts) * len(self._tasks.actions)

    def time(self, start: int, stop: int) -> float:
        """Of one microbatch, there and back, in the layers from start to stop."""
        return self._until[stop] - self._until[start]

    def bytes(self, stage: int) -> list[float]:
        """What each layer needs in this stage: activations of the microbatches held at once, versions of weights.

        A rank needs at least the sum over any one of its stages, besides messages that wait.
        """
        microbatches, versions = self._in_flight[stage]
        return [microbatches * a + versions * w for a, w in zip(self._costs.activation, self._costs.weights)]

    def ranks(self) -> Collection[list[int]]:
        """The stages of each rank."""
        stages = defaultdict(list)
        for (_, stage), rank in self._schedule.placement.items():
            stages[rank].append(stage)
        return stages.values()

    def objective(self, counts: Sequence[int]) -> float:
        """The time by formula: Σ t + messages + (microbatches - 1) · t of the slowest rank.

        Exact for GPipe whose costs of forward and backward are proportional.

        Source: Zheng et al., "Alpa" (OSDI 2022), §5.2, to which messages are added.
        """
        ends = [0, *accumulate(counts)]
        loads = [sum(self.time(ends[s], ends[s + 1]) for s in stages) for stages in self.ranks()]
        messages = sum(self.boundary[end] for end in ends)
        return self.time(0, self.layers) + messages + self.rounds * max(loads) / self.replicas

    def judge(self, counts: Sequence[int]) -> Verdict:
        """Simulate it."""
        key = tuple(counts)
        if key not in self._verdicts:
            ends = [0, *accumulate(counts)]

            def sums(values: Sequence[float]) -> list[float]:
                return [sum(values[start:stop]) for start, stop in zip(ends, ends[1:])]

            edges = [Edge(s, s + 1, (self._costs.message[end - 1],), "uint8") for s, end in enumerate(ends[1:-1])]
            layers = self._costs
            costs = Costs(
                sums(layers.forward), sums(layers.input_gradient), sums(layers.weight_gradient),
                activation=sums(layers.activation), weights=sums(layers.weights),
                latency=self._latency, bandwidth=self._bandwidth,
            )  # fmt: skip
            cut = replace(self._schedule, graph=StageGraph(self.stages, edges))
            result = simulate(cut, costs, self._tasks)
            peak = max(result.peak)
            self._verdicts[key] = Verdict(max(0.0, peak - self.limit), result.makespan, peak)
        return self._verdicts[key]


def _in_flight(schedule: Schedule) -> list[tuple[float, int]]:
    """Microbatches, and versions of weights, that each stage holds at most: the order alone decides it."""
    most = [(0.0, 1)] * schedule.graph.stages
    microbatches: defaultdict[tuple[int, int], float] = defaultdict(float)
    versions: defaultdict[tuple[int, int], int] = defaultdict(lambda: 1)
    for order in schedule.order:
        for action in flat(order):
            place = action.replica, action.stage
            if action.kind == FORWARD:
                microbatches[place] += 1 / schedule.slices
            elif action.kind in (BACKWARD, WEIGHT_GRADIENT):
                microbatches[place] -= 1 / schedule.slices
            elif schedule.delayed and action.kind in (UPDATE, FREE):
                versions[place] += 1 if action.kind == UPDATE else -1
            before = most[action.stage]
            most[action.stage] = max(before[0], microbatches[place]), max(before[1], versions[place])
    return most
