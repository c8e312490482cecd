"""The list scheduler: an order for any stage graph, placement and costs."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from hpctrain.pipeline.actions import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action
from hpctrain.pipeline.graph import StageGraph
from hpctrain.pipeline.schedules import COSTS, Schedule
from hpctrain.pipeline.simulate import Costs, delays
from hpctrain.pipeline.synchronous import at_least_one, check, check_placed, with_flush
from hpctrain.pipeline.tasks import needs


def list_schedule(
    graph: StageGraph,
    placement: Mapping[tuple[int, int], int],
    microbatches: int,
    costs: Costs = COSTS,
    split: bool = False,
    in_flight: int | None = None,
) -> Schedule:
    """Whenever a rank is free it takes, of the work that is ready, gradients before forwards before weight gradients,
    then the lowest microbatch, then the longest way to the end.

    Args:
        placement: {(replica, stage): rank}; microbatch m belongs to replica m modulo the replicas.
        split: separate input and weight gradients.
        in_flight: how many microbatches may be under way in the whole pipeline. A bound on whole microbatches cannot
            deadlock, as one on a rank's memory can: whatever was let in can always finish.

    Raises:
        ValueError: for a stage without a rank, costs that do not fit the stages, or a size below 1.
    """
    return _Greedy(graph, placement, microbatches, costs, split, in_flight).schedule()


class _Greedy:
    def __init__(self, graph, placement, microbatches, costs, split, in_flight):
        check(stages=graph.stages, microbatches=microbatches)
        at_least_one(in_flight=microbatches if in_flight is None else in_flight)
        self.graph, self.placement, self.microbatches = graph, placement, microbatches
        self.times, _ = costs.tables(graph.stages, 1)
        self.delay = delays(graph, costs)
        self.kinds = (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT) if split else (FORWARD, BACKWARD)
        replicas = 1 + max((replica for replica, _ in placement if replica >= 0), default=0)
        check_placed(graph, placement, range(replicas))
        self.ranks = 1 + max(placement.values())
        self.admitted = min(microbatches, in_flight or microbatches)
        self.left = [graph.stages * len(self.kinds)] * microbatches  # actions of each microbatch to be done
        self.actions = [
            Action(kind, m % replicas, stage, m)
            for m in range(microbatches)
            for stage in range(graph.stages)
            for kind in self.kinds
        ]
        self.after: dict[tuple, list[tuple[Action, int | None]]] = {}
        self.missing: dict[Action, int] = {}
        self.at: dict[Action, float] = {}  # when all its inputs are there
        for action in self.actions:
            wanted = list(needs(action, graph, 1))
            self.missing[action], self.at[action] = len(wanted), 0.0
            for kind, unit, edge in wanted:
                self.after.setdefault((kind, unit), []).append((action, edge))
        self.tail = self._tails()

    def _tails(self) -> dict[str, list[float]]:
        """By stage, the time to the end of its microbatch from a forward and from a gradient."""
        graph, gradient = self.graph, self.kinds[1]
        tails = {FORWARD: [0.0] * graph.stages, gradient: [0.0] * graph.stages, WEIGHT_GRADIENT: [0.0] * graph.stages}
        for stage in graph.sorted:
            behind = max((tails[gradient][source] for _, source in graph.into[stage]), default=0.0)
            tails[gradient][stage] = self.times[gradient][stage] + behind
        for stage in reversed(graph.sorted):
            behind = max((tails[FORWARD][target] for _, target in graph.out[stage]), default=tails[gradient][stage])
            tails[FORWARD][stage] = self.times[FORWARD][stage] + behind
        return tails

    def _priority(self, action: Action) -> tuple:
        rank = {FORWARD: 1, WEIGHT_GRADIENT: 2}.get(action.kind, 0)
        return rank, action.microbatch, -self.tail[action.kind][action.stage], action

    def schedule(self) -> Schedule:
        order: list[list[Action]] = [[] for _ in range(self.ranks)]
        ready: list[list[tuple]] = [[] for _ in range(self.ranks)]
        idle = [True] * self.ranks
        # (time, ends before what becomes ready, action): (end of work 0, inputs there 1)
        events = [(0.0, 1, a) for a in self.actions if not self.missing[a] and a.microbatch < self.admitted]
        heapq.heapify(events)
        while events:
            now, touched = events[0][0], set()
            while events and events[0][0] == now:
                _, kind, action = heapq.heappop(events)
                rank = self.placement[action.replica, action.stage]
                touched.add(rank)
                if kind == 1:
                    heapq.heappush(ready[rank], self._priority(action))
                else:
                    idle[rank] = True
                    for event in self._finish(action, now, rank):
                        heapq.heappush(events, event)
            for rank in touched:
                if idle[rank] and ready[rank]:
                    action = heapq.heappop(ready[rank])[-1]
                    order[rank].append(action)
                    idle[rank] = False
                    heapq.heappush(events, (now + self.times[action.kind][action.stage], 0, action))
        return with_flush("list", order, self.placement, self.microbatches, graph=self.graph)

    def _finish(self, action: Action, now: float, rank: int):
        """The events that follow: actions that have all inputs, and the microbatch let in for one that is done."""
        gives = FORWARD if action.kind == FORWARD else INPUT_GRADIENT
        followers = [] if action.kind == WEIGHT_GRADIENT else self.after.get((gives, action.unit), [])
        for other, edge in followers:
            there = self.placement[other.replica, other.stage]
            at = now + self.delay[edge] if edge is not None and there != rank else now
            self.at[other] = max(self.at[other], at)
            self.missing[other] -= 1
            if not self.missing[other] and other.microbatch < self.admitted:
                yield self.at[other], 1, other
        self.left[action.microbatch] -= 1
        if not self.left[action.microbatch] and self.admitted < self.microbatches:
            new, self.admitted = self.admitted, self.admitted + 1
            for stage in range(self.graph.stages):
                other = Action(FORWARD, new % (1 + max(r for r, _ in self.placement)), stage, new)
                if not self.graph.into[stage]:
                    yield now, 1, other
