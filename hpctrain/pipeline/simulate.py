"""The simulator: when everything in a schedule happens, what waits for what, and how much memory it holds.

Ranks work in their order and at once with the messages; a message takes its edge's latency and its bytes over the
bandwidth, and messages do not slow each other down.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hpctrain.pipeline.actions import (
    BACKWARD,
    FORWARD,
    FREE,
    INPUT_GRADIENT,
    REDUCE,
    UPDATE,
    WEIGHT_GRADIENT,
    Action,
    flat,
)
from hpctrain.pipeline.tasks import Tasks

if TYPE_CHECKING:
    from hpctrain.pipeline.graph import StageGraph
    from hpctrain.pipeline.schedule_like import ScheduleLike

PerStage = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """Times of one microbatch and bytes, for all stages or a list with one of each. Any unit of time.

    Attributes:
        forward, input_gradient, weight_gradient: a full backward takes both gradients' time.
        reduce, update: once a stage.
        fused: a fused pair takes this part of its forward and backward, less than 1 where they hide communication.
        slices: part of a microbatch's time that each token slice takes; equal by default.
        latency, bandwidth: of a message; bytes per unit of time. A list of latencies has one of each edge.
        activation: bytes held from a forward to its gradients. Messages that arrived and wait are counted besides.
        kept: bytes still held between the input gradient and the weight gradient; by default, all.
        weights: bytes of one version of a stage's weights.
    """

    forward: PerStage = 1.0
    input_gradient: PerStage = 1.0
    weight_gradient: PerStage = 1.0
    reduce: PerStage = 0.0
    update: PerStage = 0.0
    fused: float = 1.0
    slices: Sequence[float] | None = None
    latency: PerStage = 0.0
    bandwidth: float = math.inf
    activation: PerStage = 1.0
    kept: PerStage | None = None
    weights: PerStage = 0.0

    def scaled(self, factor: float) -> Costs:
        """The same for stages of `factor` times the layers."""
        names = ("forward", "input_gradient", "weight_gradient", "update", "reduce", "activation", "kept", "weights")
        scale: dict[str, Any] = {}
        for name in names:
            value = getattr(self, name)
            if value is not None:
                scale[name] = value * factor if isinstance(value, (int, float)) else [v * factor for v in value]
        return replace(self, **scale)

    def tables(self, stages: int, slices: int) -> tuple[dict[str, list[float]], list[float]]:
        """Time of each kind of action by stage, and the part of it that each slice takes.

        Raises:
            ValueError: for a list of another length, or a cost below zero.
        """
        forward, inputs = _table("forward", self.forward, stages), _table("input_gradient", self.input_gradient, stages)
        weights = _table("weight_gradient", self.weight_gradient, stages)
        latencies = [self.latency] if isinstance(self.latency, (int, float)) else list(self.latency)
        if not (self.bandwidth > 0 and min(latencies, default=0) >= 0 and self.fused >= 0):
            raise ValueError(
                f"latency={self.latency} and fused={self.fused} must be at least 0, bandwidth={self.bandwidth} above 0"
            )
        times = {
            FORWARD: forward,
            INPUT_GRADIENT: inputs,
            WEIGHT_GRADIENT: weights,
            BACKWARD: [a + b for a, b in zip(inputs, weights)],
            REDUCE: _table("reduce", self.reduce, stages),
            UPDATE: _table("update", self.update, stages),
            FREE: [0.0] * stages,
        }
        return times, _table("slices", 1 / slices if self.slices is None else self.slices, slices)


@dataclass(frozen=True)
class Span:
    """Actions that one rank does together (one, or a fused pair), from `start` to `end`."""

    rank: int
    actions: tuple[Action, ...]
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """What a schedule does.

    Attributes:
        makespan: from the start to the end of the last action.
        busy[r], idle[r]: time that rank r works, and the rest of the makespan.
        bubble[r]: idle / makespan, 0 to 1.
        peak[r]: the most bytes rank r holds at once: activations, messages that wait, versions of weights.
        staleness: {(replica, stage): updates at most between the weights a gradient is of and those it changes}.
        critical_path: the actions that decide the makespan, each waiting for the one before.
        tasks, starts, ends: what was simulated, and when each task starts and ends.
    """

    makespan: float
    busy: list[float]
    peak: list[float]
    staleness: dict[tuple[int, int], int]
    critical_path: list[Action]
    tasks: Tasks
    starts: list[float]
    ends: list[float]

    @property
    def idle(self) -> list[float]:
        return [self.makespan - busy for busy in self.busy]

    @property
    def bubble(self) -> list[float]:
        return [idle / self.makespan if self.makespan else 0.0 for idle in self.idle]

    @property
    def spans(self) -> list[list[Span]]:
        """What each rank does, in its order."""
        spans: list[list[Span]] = [[] for _ in self.busy]
        for task in self.tasks.order:
            actions, ranks = self.tasks.actions[task], self.tasks.ranks[task]
            for at, rank in enumerate(ranks):
                own = actions if len(ranks) == 1 else (actions[at],)
                spans[rank].append(Span(rank, own, self.starts[task], self.ends[task]))
        return spans


def simulate(schedule: ScheduleLike, costs: Costs, tasks: Tasks) -> Simulation:
    """Run the sorted tasks of a schedule. See `Schedule.simulate`."""
    starts, ends, cause = run(schedule, costs, tasks)
    path: list[Action] = []
    task = max(reversed(tasks.order), key=ends.__getitem__, default=-1)
    while task >= 0:
        path += reversed(tasks.actions[task])
        task = cause[task]
    return Simulation(
        max(ends, default=0.0),
        busy(schedule, tasks, starts, ends),
        _peaks(schedule, costs, tasks, starts, ends),
        staleness(schedule),
        path[::-1],
        tasks,
        starts,
        ends,
    )


def run(schedule: ScheduleLike, costs: Costs, tasks: Tasks) -> tuple[list[float], list[float], list[int]]:
    """When each task starts and ends, and the task that it waited for last, or -1."""
    taken, delay = durations(schedule, costs, tasks)
    starts, ends, cause = [0.0] * len(taken), [0.0] * len(taken), [-1] * len(taken)
    for task in tasks.order:
        start, why = 0.0, -1
        for giver, edge in tasks.before[task]:
            at = ends[giver] if edge is None else ends[giver] + delay[edge]
            if at > start or why < 0:
                start, why = at, giver
        starts[task], ends[task], cause[task] = start, start + taken[task], why
    return starts, ends, cause


def durations(schedule: ScheduleLike, costs: Costs, tasks: Tasks) -> tuple[list[float], list[float]]:
    """What each task takes, and the message on each edge."""
    times, parts = costs.tables(schedule.graph.stages, schedule.slices)
    whole = schedule.slices == 1 and parts == [1.0]
    taken = []
    for actions, ranks in zip(tasks.actions, tasks.ranks):
        if len(actions) == 1:
            action = actions[0]
            time = times[action.kind][action.stage]
            if not whole and action.kind not in (REDUCE, UPDATE, FREE):
                time *= parts[action.slice]
        elif len(ranks) > 1:
            time = times[REDUCE][actions[0].stage]
        else:
            time = costs.fused * sum(times[a.kind][a.stage] * parts[a.slice] for a in actions)
        taken.append(time)
    return taken, delays(schedule.graph, costs)


def delays(graph: StageGraph, costs: Costs) -> list[float]:
    """What the message on each edge takes."""
    latency = _table("latency", costs.latency, len(graph.edges))
    return [each + edge.bytes / costs.bandwidth for each, edge in zip(latency, graph.edges)]


def busy(schedule: ScheduleLike, tasks: Tasks, starts: Sequence[float], ends: Sequence[float]) -> list[float]:
    """Time that each rank works."""
    times: list[list[float]] = [[] for _ in range(schedule.ranks)]
    for task, ranks in enumerate(tasks.ranks):
        for rank in ranks:
            times[rank].append(ends[task] - starts[task])
    return [math.fsum(each) for each in times]


def staleness(schedule: ScheduleLike) -> dict[tuple[int, int], int]:
    """Updates between the weights a gradient was computed with and those it is applied to, the most by stage.

    Read from the order alone: it holds whatever the costs are.
    """
    worst = dict.fromkeys(schedule.placement, 0)
    oldest: dict[tuple[int, int], int] = {}  # of the gradients in no update yet
    for order in schedule.order:
        for action in flat(order):
            place = action.replica, action.stage
            if action.kind in (BACKWARD, WEIGHT_GRADIENT):
                oldest[place] = min(action.version, oldest.get(place, action.version))
            elif action.kind == UPDATE and place in oldest:
                worst[place] = max(worst[place], action.version - 1 - oldest.pop(place))
    return worst


def peaks(schedule: ScheduleLike, costs: Costs, done: Simulation) -> list[float]:
    """The most bytes each rank holds at once in a simulation that is done, for the memory of other costs."""
    return _peaks(schedule, costs, done.tasks, done.starts, done.ends)


def _peaks(schedule, costs: Costs, tasks: Tasks, starts, ends) -> list[float]:
    """Every change as (time, before or after what begins then, bytes), summed in that order."""
    graph, stages = schedule.graph, schedule.graph.stages
    saved, weights = _table("activation", costs.activation, stages), _table("weights", costs.weights, stages)
    kept = saved if costs.kept is None else _table("kept", costs.kept, stages)
    parts = costs.tables(stages, schedule.slices)[1]
    changes: list[list[tuple[float, int, float]]] = [[] for _ in range(schedule.ranks)]
    place = [0] * len(tasks.order)
    for at, task in enumerate(tasks.order):
        place[task] = at
    carries = any(edge.bytes for edge in graph.edges)
    moves = carries or schedule.delayed or any(saved) or any(kept)
    for task, actions in enumerate(tasks.actions if moves else ()):
        rank, start, end, at = tasks.ranks[task][0], starts[task], ends[task], 2 * place[task]
        if carries:  # before the forward below: the message becomes a part of what it holds
            for giver, edge in tasks.before[task]:
                if edge is not None:
                    size = graph.edges[edge].bytes / schedule.slices
                    changes[rank] += [(start, at, -size), (ends[giver], 2 * place[giver] + 1, size)]
        for action in actions:
            stage, part = action.stage, parts[action.slice] if action.slice < len(parts) else 1.0
            if action.kind == FORWARD:
                if schedule.training:
                    changes[rank].append((start, at, saved[stage] * part))
                else:
                    changes[rank] += [(start, at, saved[stage] * part), (end, at + 1, -saved[stage] * part)]
            elif action.kind == BACKWARD:
                changes[rank].append((end, at + 1, -saved[stage] * part))
            elif action.kind == INPUT_GRADIENT:
                changes[rank].append((end, at + 1, (kept[stage] - saved[stage]) * part))
            elif action.kind == WEIGHT_GRADIENT:
                changes[rank].append((end, at + 1, -kept[stage] * part))
            elif schedule.delayed and action.kind in (UPDATE, FREE):
                changes[rank].append((end, at + 1, weights[stage] if action.kind == UPDATE else -weights[stage]))
    peaks = [0.0] * schedule.ranks
    for (_, stage), rank in schedule.placement.items():
        peaks[rank] += weights[stage]
    for rank, events in enumerate(changes):
        now = peaks[rank]
        # At one instant what is freed goes first. Events of the same rank that take no time keep their order.
        for _, _, size in sorted(events, key=_moment):
            now += size
            peaks[rank] = max(peaks[rank], now)
    return peaks


def _moment(change: tuple[float, int, float]) -> tuple[float, int]:
    return change[0], change[1]


def _table(name: str, value: PerStage, length: int) -> list[float]:
    table = [float(value)] * length if isinstance(value, (int, float)) else [float(v) for v in value]
    if len(table) != length:
        raise ValueError(f"{name} lists {len(table)} values; give one, or {length}")
    if not all(0 <= v < math.inf for v in table):
        raise ValueError(f"{name}={value}: costs are finite and at least 0")
    return table
