"""Lowering: place sends and receives into a schedule so that no order of blocking can deadlock.

The schedule is simulated once. Whenever a piece of work is finished whose result another rank needs, the send is
appended to the one rank's program and the receive to the other's at the same instant of one global order. Then even
fully blocking messages complete: of the transfers not yet done, the earliest has nothing unfinished before it on either
rank.
"""

from __future__ import annotations

import heapq

from hpctrain.pipeline.schedule import Action

COST = {"forward": 1, "backward": 2}


def lower(order: list[list[Action]]) -> list[list[Action]]:
    """Programs with messages, one a rank, for a chain of stages with one stage a rank.

    Raises:
        ValueError: when the order cannot be carried out, naming the actions that wait for each other.
    """
    stages = len(order)
    position, finished = [0] * stages, {}
    events = []  # (time, what comes first at that time, number, action or transfer)
    ready = [(0, rank) for rank in range(stages) if order[rank]]
    heapq.heapify(ready)
    waiting: dict[tuple, list[int]] = {}  # work not finished -> ranks whose next action needs it
    clock = [0] * stages
    while ready:
        time, rank = heapq.heappop(ready)
        action = order[rank][position[rank]]
        needed = _needs(action, stages)
        missing = [work for work in needed if work not in finished]
        if missing:
            waiting.setdefault(missing[0], []).append(rank)
            continue
        start = max([time, clock[rank], *(finished[work] for work in needed)])
        end = clock[rank] = start + COST[action.kind]
        position[rank] += 1
        finished[action[:3]] = end
        events.append((start, 1, len(events), rank, action))
        if transfer := _transfer(action, stages):
            events.append((end, 0, len(events), rank, transfer))
        for other in waiting.pop(action[:3], []):
            heapq.heappush(ready, (end, other))
        if position[rank] < len(order[rank]):
            heapq.heappush(ready, (end, rank))
    stuck = [order[rank][position[rank]] for rank in range(stages) if position[rank] < len(order[rank])]
    if stuck:
        raise ValueError("the schedule cannot be carried out; these wait for work that never comes: " + repr(stuck))

    programs: list[list[Action]] = [[] for _ in range(stages)]
    for _, _, _, rank, action in sorted(events):
        if action.kind == "send":
            programs[rank].append(action)
            programs[action.peer].append(action._replace(kind="receive", peer=rank))
        else:
            programs[rank].append(action)
    return programs


def blocking_replay(programs: list[list[Action]]) -> None:
    """Certificate: run the programs with messages that block both ends until both are there.

    Raises:
        ValueError: when they deadlock, with the action at which each rank stands.
    """
    position = [0] * len(programs)

    def current(rank):
        return programs[rank][position[rank]] if position[rank] < len(programs[rank]) else None

    moved = True
    while moved:
        moved = False
        for rank in range(len(programs)):
            while (action := current(rank)) is not None:
                if action.kind in ("send", "receive"):
                    other = current(action.peer)
                    opposite = {"send": "receive", "receive": "send"}[action.kind]
                    if other is None or other._replace(peer=action.peer) != action._replace(kind=opposite):
                        break
                    position[action.peer] += 1
                position[rank] += 1
                moved = True
    standing = {rank: current(rank) for rank in range(len(programs)) if current(rank)}
    if standing:
        raise ValueError(f"the programs deadlock when messages block: {standing}")


def _needs(action: Action, stages: int) -> list[tuple]:
    """Work that must be finished before, as (kind, stage, microbatch)."""
    if action.kind == "forward":
        return [("forward", action.stage - 1, action.microbatch)] if action.stage else []
    needed = [("forward", action.stage, action.microbatch)]
    if action.stage < stages - 1:
        needed.append(("backward", action.stage + 1, action.microbatch))
    return needed


def _transfer(action: Action, stages: int) -> Action | None:
    stage = action.stage
    if action.kind == "forward" and stage < stages - 1:
        return Action("send", stage, action.microbatch, stage + 1, 2 * stage)
    if action.kind == "backward" and stage > 0:
        return Action("send", stage, action.microbatch, stage - 1, 2 * (stage - 1) + 1)
    return None
