"""Lowering: place sends and receives into a schedule so that no order of blocking can deadlock, and prove it.

The schedule is simulated once. Whenever a piece of work is finished whose result another rank needs, the send is
appended to the one rank's program and the receive to the other's at the same instant of one global order; so are the
parts of a reduction. Then even fully blocking messages complete: of the transfers not yet done, the earliest has
nothing unfinished before it on either rank. The certificate does not rely on that proof: it replays the programs.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.pipeline.actions import FORWARD, GRADIENT, INPUT_GRADIENT, RECEIVE, REDUCE, SEND, WORK, Action
from hpctrain.pipeline.graph import StageGraph
from hpctrain.pipeline.simulate import Simulation
from hpctrain.pipeline.tasks import Tasks, needs

if TYPE_CHECKING:
    from hpctrain.pipeline.schedule_like import ScheduleLike


@dataclass(frozen=True)
class Lowered:
    """Programs with messages.

    Attributes:
        programs[r]: what rank r does, in order.
        placement: {(replica, stage): rank}.
        graph, slices: of the schedule.
    """

    programs: list[list[Action]]
    placement: dict[tuple[int, int], int]
    graph: StageGraph
    slices: int = 1

    def is_gradient(self, message: Action) -> bool:
        """Whether a send or receive carries a gradient: then its sender is the stage where the edge ends."""
        assert message.edge is not None
        return message.stage == self.graph.edges[message.edge].target

    def to_json(self) -> str:
        """The programs, for a replay by any other program."""
        names = ("kind", "replica", "stage", "microbatch", "slice", "version", "peer", "edge")
        return json.dumps(
            {
                "ranks": [[dict(zip(names, action)) for action in program] for program in self.programs],
                "placement": [[*place, rank] for place, rank in sorted(self.placement.items())],
                "edges": [[edge.source, edge.target] for edge in self.graph.edges],
            }
        )

    def replay(self) -> None:
        """The certificate: run the programs with messages that block both ends until both are there, and reductions
        that block until all their ranks are; every piece of work must find its inputs on its rank.

        Raises:
            ValueError: naming the work without its input, or the action at which each rank stands still.
        """
        position = [0] * len(self.programs)
        here: list[set[tuple]] = [set() for _ in self.programs]  # results on the rank
        moved = True

        def current(rank):
            return self.programs[rank][position[rank]] if position[rank] < len(self.programs[rank]) else None

        while moved:
            moved = False
            for rank in range(len(self.programs)):
                while (action := current(rank)) is not None:
                    ranks = self._together(action, rank, current)
                    if ranks is None:
                        break
                    self._check(action, rank, here)
                    for one in ranks:
                        position[one] += 1
                    moved = True
        standing = [f"rank {rank} at {current(rank)}" for rank in range(len(self.programs)) if current(rank)]
        if standing:
            raise ValueError("the programs deadlock when messages block: " + "; ".join(standing))

    def _together(self, action: Action, rank: int, current) -> list[int] | None:
        """The ranks that pass with this one; None while one of them is not there yet."""
        if action.kind in (SEND, RECEIVE):
            peer = action.peer
            assert peer is not None
            other = current(peer) if peer != rank else None
            opposite = action._replace(kind=RECEIVE if action.kind == SEND else SEND, peer=rank)
            return [rank, peer] if other == opposite else None
        if action.kind == REDUCE:
            ranks = [home for (_, stage), home in self.placement.items() if stage == action.stage]
            there = [current(one) for one in ranks]
            return ranks if all(a and (a.kind, a.stage) == (REDUCE, action.stage) for a in there) else None
        return [rank]

    def _check(self, action: Action, rank: int, here: list[set[tuple]]) -> None:
        """What it needs must be here; what it gives is here from now on."""
        if action.kind in (SEND, RECEIVE):
            kind = INPUT_GRADIENT if self.is_gradient(action) else FORWARD
            result = kind, *action.unit
            assert action.peer is not None
            sender, receiver = (rank, action.peer) if action.kind == SEND else (action.peer, rank)
            if result not in here[sender]:
                raise ValueError(f"rank {sender} sends what it does not have: {action}")
            here[receiver].add((*result, action.edge))
        elif action.kind in WORK:
            for kind, unit, edge in needs(action, self.graph, self.slices):
                if (kind, *unit) not in here[rank] and (kind, *unit, edge) not in here[rank]:
                    raise ValueError(f"{action} on rank {rank} has no {Action(kind, *unit)}")
            if action.kind == FORWARD:
                here[rank].add((FORWARD, *action.unit))
            elif action.kind in GRADIENT:
                here[rank].add((INPUT_GRADIENT, *action.unit))


def lower(schedule: ScheduleLike, tasks: Tasks, simulation: Simulation) -> Lowered:
    """Programs with messages for a validated schedule, replayed. See `Schedule.lower`."""
    programs: list[list[Action]] = [[] for _ in range(schedule.ranks)]
    for item in _global_order(tasks, simulation):
        if len(item) == 1:
            for rank, actions in _shares(tasks, item[0]):
                programs[rank] += actions
        else:
            giver, task, (_, unit, edge) = item
            version = next(action.version for action in tasks.actions[giver] if action.unit == unit)
            send = Action(SEND, *unit)._replace(version=version, edge=edge)
            here, there = tasks.ranks[giver][0], tasks.ranks[task][0]
            programs[here].append(send._replace(peer=there))
            programs[there].append(send._replace(kind=RECEIVE, peer=here))
    lowered = Lowered(programs, dict(schedule.placement), schedule.graph, schedule.slices)
    lowered.replay()
    return lowered


def _global_order(tasks: Tasks, simulation: Simulation) -> Iterator[tuple]:
    """(task,) and (giver, task, need) for transfers, by simulated time; transfers before the work of the same instant.

    Work that takes no time makes instants ambiguous, so nothing is listed before all it waits for.
    """
    items: list[tuple] = [(task,) for task in range(len(tasks.actions))]
    after: list[list[int]] = [[] for _ in items]
    missing = [0] * len(items)
    when = [(start, 1) for start in simulation.starts]
    for task, before in enumerate(tasks.before):
        for giver, edge in before:
            if edge is None:
                after[giver].append(task)
                missing[task] += 1
    for giver, task, need in tasks.transfers():
        after[giver].append(len(items))
        after.append([task])
        missing[task] += 1
        missing.append(1)
        when.append((simulation.ends[giver], 0))
        items.append((giver, task, need))
    ready = [(*when[item], item) for item, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    while ready:
        *_, item = heapq.heappop(ready)
        yield items[item]
        for other in after[item]:
            missing[other] -= 1
            if not missing[other]:
                heapq.heappush(ready, (*when[other], other))


def _shares(tasks: Tasks, task: int) -> Iterator[tuple[int, tuple[Action, ...]]]:
    ranks, actions = tasks.ranks[task], tasks.actions[task]
    if len(ranks) == 1:
        yield ranks[0], actions
    else:
        for rank, action in zip(ranks, actions):
            yield rank, (action,)
