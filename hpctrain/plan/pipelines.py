"""A pipeline's time by its simulator, for costs that a plan tries by the thousand."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from hpctrain.pipeline import Costs, Schedule, schedule
from hpctrain.pipeline.actions import BACKWARD, FORWARD, GRADIENT, WEIGHT_GRADIENT, flat
from hpctrain.pipeline.simulate import run
from hpctrain.pipeline.tasks import Tasks
from hpctrain.plan import shared_cores

LARGEST = 1 << 12  # stages × microbatches that are simulated one by one


@dataclass(frozen=True)
class Shape:
    """A schedule, without costs.

    Attributes:
        in_flight[rank]: {stage: microbatches that it holds at most}, as the order alone decides.
    """

    schedule: Schedule
    in_flight: list[dict[int, float]]

    @functools.cached_property
    def tasks(self) -> Tasks:
        """What waits for what: for times, not for memory."""
        return Tasks(self.schedule)


@functools.lru_cache(maxsize=256)
def shape(name: str, ranks: int, microbatches: int, virtual_stages: int, slices: int = 0) -> Shape:
    """Of a schedule by name; errors as `pipeline.schedule`."""
    found = schedule(name, ranks, microbatches, virtual_stages or None, slices or None)
    in_flight = []
    for order in found.order:
        in_memory: dict[int, float] = {}
        most: dict[int, float] = {}
        for action in flat(order):
            stage = action.stage
            if action.kind == FORWARD:
                in_memory[stage] = in_memory.get(stage, 0) + 1 / found.slices
                most[stage] = max(most.get(stage, 0), in_memory[stage])
            elif action.kind in (BACKWARD, WEIGHT_GRADIENT):
                in_memory[stage] -= 1 / found.slices
        in_flight.append(most)
    return Shape(found, in_flight)


def simulated(name: str, ranks: int, microbatches: int, virtual_stages: int, slices: int = 0) -> tuple[int, ...]:
    """The numbers of microbatches that are simulated: two, from which the time of a long pipeline follows, as after the
    first rounds of `ranks` microbatches all others take the same time; else the one."""
    first = first_rounds(name, ranks, microbatches, virtual_stages)
    if ranks * max(1, virtual_stages) * microbatches <= LARGEST or microbatches < first + ranks or slices:
        return (microbatches,)
    return first, first + ranks


def first_rounds(name: str, ranks: int, microbatches: int, virtual_stages: int) -> int:
    """Microbatches of the rounds after which all others are alike."""
    rounds = 1 if name in ("gpipe", "1f1b", "zb-h1") else max(3, virtual_stages + 1)
    return rounds * ranks + microbatches % ranks


def makespan(
    name: str, ranks: int, microbatches: int, virtual_stages: int, costs: Costs, slices: int = 0, share: float = 1.0
) -> float:
    """Of a step; where ranks have but a `share` of a core each, those that work have what is left by those that do
    not (`shared_cores.makespan`)."""
    counts = simulated(name, ranks, microbatches, virtual_stages, slices)
    times = []
    for count in counts:
        found = shape(name, ranks, count, virtual_stages, slices)
        if share < 1:
            times.append(shared_cores.makespan(found.schedule, costs, found.tasks, share))
        else:
            times.append(max(run(found.schedule, costs, found.tasks)[1]))
    if len(times) == 1:
        return times[0]
    return times[0] + (times[1] - times[0]) * (microbatches - counts[0]) / (counts[1] - counts[0])


@functools.lru_cache(maxsize=1 << 12)
def in_flight(name: str, ranks: int, microbatches: int, virtual_stages: int, slices: int = 0) -> list[dict[int, float]]:
    """`Shape.in_flight` of any number of microbatches; GPipe alone holds more than the first rounds have."""
    if name == "gpipe":
        return [{rank: microbatches} for rank in range(ranks)]
    if not slices:
        microbatches = min(microbatches, first_rounds(name, ranks, microbatches, virtual_stages))
    return shape(name, ranks, microbatches, virtual_stages, slices).in_flight


@functools.lru_cache(maxsize=1 << 12)
def placement(name: str, ranks: int, microbatches: int, virtual_stages: int, slices: int = 0) -> tuple:
    """The stages of each rank, and how many copies of the model a pipeline has."""
    if name in ("gpipe", "1f1b", "zb-h1", "terapipe"):
        return [[rank] for rank in range(ranks)], 1
    if name == "interleaved":
        return [list(range(rank, ranks * (virtual_stages or 2), ranks)) for rank in range(ranks)], 1
    if name == "zb-v":
        return [[rank, 2 * ranks - 1 - rank] for rank in range(ranks)], 1
    few = simulated(name, ranks, microbatches, virtual_stages, slices)[0]
    found = shape(name, ranks, few, virtual_stages, slices).schedule
    local: list[list[int]] = [[] for _ in range(ranks)]
    for (_, stage), rank in found.placement.items():
        local[rank].append(stage)
    return local, found.replicas


def messages(schedule: Schedule, rank: int) -> int:
    """Messages that a rank receives in a step: what its work needs of other ranks."""
    count = 0
    for action in flat(schedule.order[rank]):
        if action.kind == FORWARD:
            neighbours = schedule.graph.into[action.stage]
        elif action.kind in GRADIENT:
            neighbours = schedule.graph.out[action.stage]
        else:
            continue
        count += sum(schedule.placement[action.replica, stage] != rank for _, stage in neighbours)
    return count
