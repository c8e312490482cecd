"""How far others use the cores that a measurement needs."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import NamedTuple


class Used(NamedTuple):
    """Seconds on the clock, of CPU by the whole host (with what its hypervisor took away), and by this process."""

    wall: float
    host: float
    own: float


class Stopwatch:
    """From when it is made."""

    def __init__(self):
        self._begin = _now()

    def used(self) -> Used:
        return Used(*(now - then for now, then in zip(_now(), self._begin)))


def lacking(ranks: Sequence[Used], cores: int, threads: int) -> float:
    """Cores that the ranks of a host have to share with others.

    Args:
        ranks: what each rank of the host saw.
        cores: that the ranks may keep busy.
        threads: of a rank.

    >>> busy = [Used(10.0, 25.0, 9.0), Used(10.0, 25.0, 9.0)]    # others use 0.7 cores
    >>> [round(lacking(busy, cores, threads), 3) for cores, threads in ((4, 1), (2, 1), (4, 2))]
    [0.0, 0.7, 0.7]
    """
    wall = sum(rank.wall for rank in ranks) / len(ranks)
    others = sum(rank.host for rank in ranks) / len(ranks) - sum(rank.own for rank in ranks)
    return min(max(0.0, others / wall), max(0.0, others / wall + len(ranks) * threads - cores))


def _now() -> tuple[float, float, float]:
    return time.perf_counter(), _host_seconds(), time.process_time()


def _host_seconds(path: str = "/proc/stat") -> float:
    """Of all cores: user, nice, system, irq, softirq and steal."""
    with open(path, encoding="ascii") as file:
        user, nice, system, _, _, irq, softirq, steal, *_ = map(int, file.readline().split()[1:])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
