"""What must come before what: the actions of a schedule as one graph of tasks.

The dependencies come from the stage graph and from nothing else; each rank's order is added to them. Reductions of one
stage over its replicas join ranks: they are one task of all these ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpctrain.pipeline.actions import (
    FORWARD,
    GRADIENT,
    INPUT_GRADIENT,
    REDUCE,
    WEIGHT_GRADIENT,
    Action,
    Fused,
)
from hpctrain.pipeline.graph import StageGraph

if TYPE_CHECKING:
    from hpctrain.pipeline.schedule_like import ScheduleLike

# What an action needs: (FORWARD or INPUT_GRADIENT, unit, edge), the result of that kind (a whole backward gives an
# input gradient too) and the edge along which another stage gives it, else None. A plain tuple: there are hundreds of
# thousands in a large schedule.
Need = tuple[str, tuple[int, int, int, int], int | None]


def needs(action: Action, graph: StageGraph, slices: int) -> Iterator[Need]:
    """What must be finished before a piece of work, from the graph alone."""
    kind, unit = action.kind, action.unit
    replica, stage, m, part = unit
    if kind == FORWARD:
        for edge, source in graph.into[stage]:
            yield (FORWARD, (replica, source, m, part), edge)
        if part:
            yield (FORWARD, (replica, stage, m, part - 1), None)
    elif kind in GRADIENT:
        yield (FORWARD, unit, None)
        for edge, target in graph.out[stage]:
            yield (INPUT_GRADIENT, (replica, target, m, part), edge)
        if part + 1 < slices:
            yield (INPUT_GRADIENT, (replica, stage, m, part + 1), None)
    elif kind == WEIGHT_GRADIENT:
        yield (INPUT_GRADIENT, unit, None)


class Tasks:
    """The tasks of a schedule.

    Attributes:
        actions[t]: the actions of task t: one, the two of a fused pair, or one of each rank for a reduction.
        ranks[t]: the ranks that carry it out.
        before[t]: what it waits for, as (task, edge); edge is None on the same rank.
        order: the tasks so that each comes after those it waits for.

    Raises:
        ValueError: when something waits for work that no rank does, or the order is impossible, naming the cycle.
    """

    def __init__(self, schedule: ScheduleLike):
        graph, slices, replicas = schedule.graph, schedule.slices, schedule.replicas
        tasks: list[tuple[Action, ...]] = []
        carriers: list[tuple[int, ...]] = []
        waits: list[list[tuple[int, int | None]]] = []
        self.actions, self.ranks, self.before = tasks, carriers, waits
        forwards: dict[tuple, int] = {}  # by unit, the task that gives it
        gradients: dict[tuple, int] = {}
        self._done = done = {FORWARD: forwards, INPUT_GRADIENT: gradients}
        reductions: dict[tuple, int] = {}  # (stage, how many before) -> task
        reduced: dict[tuple, int] = {}
        for rank, order in enumerate(schedule.order):
            alone = (rank,)
            previous: int | None = None
            for entry in order:
                actions: tuple[Action, ...] = entry if isinstance(entry, Fused) else (entry,)
                task = new = len(tasks)
                if replicas > 1 and not isinstance(entry, Fused) and entry.kind == REDUCE:
                    place = entry.replica, entry.stage
                    key = entry.stage, reduced.get(place, 0)
                    reduced[place] = key[1] + 1
                    task = reductions.setdefault(key, task)
                if task < new:
                    tasks[task] += actions
                    carriers[task] += alone
                else:
                    tasks.append(actions)
                    carriers.append(alone)
                    waits.append([])
                if previous is not None:
                    waits[task].append((previous, None))
                previous = task
                for action in actions:
                    kind = action.kind
                    if kind == FORWARD:
                        forwards[action.unit] = task
                    elif kind in GRADIENT:
                        gradients[action.unit] = task
        for actions, before, ranks in zip(tasks, waits, carriers):
            for action in actions:
                for kind, unit, edge in needs(action, graph, slices):
                    giver = done[kind].get(unit)
                    if giver is None:
                        raise ValueError(f"{action} waits for {Action(kind, *unit)}, which no rank does")
                    before.append((giver, None if edge is None or carriers[giver] == ranks else edge))
        self._graph, self._slices = graph, slices
        self.order = self._sort()

    def transfers(self) -> Iterator[tuple[int, int, Need]]:
        """(giver, task, need) where one rank needs what another makes."""
        for task, actions in enumerate(self.actions):
            for action in actions:
                for need in needs(action, self._graph, self._slices):
                    giver = self._done[need[0]][need[1]]
                    if self.ranks[giver] != self.ranks[task]:
                        yield giver, task, need

    def _sort(self) -> list[int]:
        after: list[list[int]] = [[] for _ in self.actions]
        for task, before in enumerate(self.before):
            for giver, _ in before:
                after[giver].append(task)
        missing = [len(before) for before in self.before]
        order = [task for task, count in enumerate(missing) if not count]
        for task in order:  # grows while it is read
            for other in after[task]:
                missing[other] -= 1
                if not missing[other]:
                    order.append(other)
        if len(order) < len(missing):
            raise ValueError("the schedule cannot be carried out: " + self._cycle(missing))
        return order

    def _cycle(self, missing: list[int]) -> str:
        task = next(task for task, count in enumerate(missing) if count)
        path = [task]
        while True:
            task = next(giver for giver, _ in self.before[task] if missing[giver])
            if task in path:
                path = [*path[path.index(task) :], task]
                return ", which waits for ".join(self.name(step) for step in path)
            path.append(task)

    def name(self, task: int) -> str:
        ranks = ", ".join(str(rank) for rank in self.ranks[task])
        return " with ".join(str(action) for action in self.actions[task]) + f" on rank {ranks}"
