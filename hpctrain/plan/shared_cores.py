"""A pipeline whose ranks share the cores of a node: those that wait lend their core to those that work."""

from __future__ import annotations

import heapq
import math

from hpctrain.pipeline import Costs, Schedule
from hpctrain.pipeline.simulate import durations
from hpctrain.pipeline.tasks import Tasks


def makespan(schedule: Schedule, costs: Costs, tasks: Tasks, share: float) -> float:
    """Seconds of a step, for `costs` where all ranks work, each with `share` of a core.

    Ranks that work have all cores between them in equal parts, up to one each: processor sharing, by events.

    >>> from hpctrain.pipeline import schedule
    >>> two = schedule("1f1b", 2, 1)
    >>> makespan(two, Costs(1.0, 1.0, 1.0), Tasks(two), 1.0), makespan(two, Costs(1.0, 1.0, 1.0), Tasks(two), 0.5)
    (6.0, 3.0)
    """
    left, delay = durations(schedule, costs, tasks)
    missing = [len(before) for before in tasks.before]
    after: list[list[tuple[int, float]]] = [[] for _ in left]
    for task, before in enumerate(tasks.before):
        for giver, edge in before:
            after[giver].append((task, 0.0 if edge is None else delay[edge]))
    arriving = [(0.0, task) for task, count in enumerate(missing) if not count]  # when all that a task needs is there
    arrived = [0.0] * len(left)
    working: set[int] = set()
    now = 0.0
    while working or arriving:
        ranks = sum(len(tasks.ranks[task]) for task in working)
        rate = min(1 / share, schedule.ranks / ranks) if ranks else 1.0
        least = min((left[task] for task in working), default=math.inf)
        end, begin = now + least / rate, arriving[0][0] if arriving else math.inf
        passed = least if end <= begin else (begin - now) * rate
        now = min(end, begin)
        for task in working:
            left[task] -= passed
        if begin < end:
            working.add(heapq.heappop(arriving)[1])
            continue
        for task in [task for task in working if left[task] <= 0.0]:
            working.remove(task)
            for other, message in after[task]:
                arrived[other] = max(arrived[other], now + message)
                missing[other] -= 1
                if not missing[other]:
                    heapq.heappush(arriving, (arrived[other], other))
    return now
