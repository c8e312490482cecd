"""Seconds of messages and collectives on the levels of a machine's network."""

from __future__ import annotations

import bisect
import functools
import math
from typing import NamedTuple

from hpctrain.plan.machine import Machine, Measured

# Operations of a layer around an exchange besides those of computing: copies, views, and the call through autograd.
EXCHANGE = 3


class Group(NamedTuple):
    """Ranks that communicate: `size` of them, `stride` apart. Every rank of the machine is in such a group at once."""

    size: int
    stride: int = 1


class Network:
    """What communication costs where all groups of one kind communicate at the same time, as axes of a grid do.

    A level's units share their bandwidth among the rings that pass through: a ring of which k of a unit's n ranks are
    members has k/n of it. The slowest level that a ring passes sets its pace. Latency is that of each hop. A ring or
    message goes from a unit to one other and has `Link.direct` of that; an all-to-all goes everywhere. Where operations
    are not queued ahead, those around an exchange take their launches besides.

    Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH" (2005);
    shared cards as in Singh et al., "A 4D hybrid algorithm to scale parallel training" (SC 2024), §4.
    """

    def __init__(self, machine: Machine):
        self.machine = machine
        self._tables = {(table.operation, table.ranks): table for table in machine.measured}
        self._node = machine.link[1].unit if len(machine.link) > 1 else math.inf
        self._path = functools.cache(self._find_path)
        self._launches = 0.0 if machine.software.asynchronous else EXCHANGE * machine.device.launch

    def all_gather(self, nbytes: float, group: Group) -> float:
        """Of which every rank has nbytes in the end."""
        return self._collective("all_gather", nbytes, group)

    def reduce_scatter(self, nbytes: float, group: Group) -> float:
        """Of nbytes on every rank."""
        return self._collective("reduce_scatter", nbytes, group)

    def all_reduce(self, nbytes: float, group: Group) -> float:
        """Of nbytes on every rank, by a ring or, where that has fewer hops, by two trees."""
        if group.size == 1 or nbytes <= 0:
            return 0.0
        if table := self._measured("all_reduce", group):
            return self._launches + interpolate(table, nbytes)
        _, per_byte, hop, _ = self._path(group)
        tree = 2 * math.ceil(math.log2(group.size)) * hop + 2 * nbytes * per_byte
        return self._launches + min(2 * self._gathered("all_gather", nbytes, group), tree)

    def all_to_all(self, nbytes: float, group: Group) -> float:
        """Of nbytes on every rank, each of which sends all but its own share."""
        if group.size == 1 or nbytes <= 0:
            return 0.0
        if table := self._measured("all_to_all", group):
            return self._launches + interpolate(table, nbytes)
        latency, _, hop, outward = self._path(group)
        # p - 1 messages, or log p rounds in which everybody sends half the bytes to one other rank
        furthest = self._path(Group(2, group.stride * group.size // 2))[1]
        rounds = math.ceil(math.log2(group.size)) * (hop + nbytes / 2 * furthest)
        return self._launches + min(latency + nbytes * outward, rounds)

    def broadcasts(self, nbytes: float, group: Group) -> float:
        """Each rank's part of nbytes to all others, one after the other, as SUMMA's panels: in log p rounds each."""
        if group.size == 1 or nbytes <= 0:
            return 0.0
        if table := self._measured("all_gather", group):
            return group.size * (self._launches + interpolate(table, nbytes / group.size))
        _, per_byte, hop, _ = self._path(group)
        return group.size * self._launches + math.ceil(math.log2(group.size)) * (group.size * hop + nbytes * per_byte)

    def message(self, nbytes: float, distance: int) -> float:
        """From a rank to the one `distance` further, while all others send as well."""
        pair = Group(2, distance)
        if table := self._measured("message", pair):
            return self._launches + interpolate(table, nbytes)
        _, per_byte, hop, _ = self._path(pair)
        return self._launches + hop + nbytes * per_byte

    def seconds_per_byte(self, group: Group) -> float:
        """Of the slowest level that a ring passes; 0 for one rank."""
        return self._path(group)[1] if group.size > 1 else 0.0

    def _collective(self, operation, nbytes, group):
        if group.size == 1 or nbytes <= 0:
            return 0.0
        return self._launches + self._gathered(operation, nbytes, group)

    def _gathered(self, operation, nbytes, group):
        if table := self._measured(operation, group):
            return interpolate(table, nbytes)
        latency, per_byte, _, _ = self._path(group)
        return latency + (group.size - 1) / group.size * nbytes * per_byte

    def _measured(self, operation: str, group: Group) -> Measured | None:
        """The table of groups of so many neighbours, which says nothing of one on several nodes."""
        table = self._tables.get((operation, group.size))
        return table if table and group.size * group.stride <= self._node else None

    def _find_path(self, group: Group) -> tuple[float, float, float, float]:
        """Latency of a ring, seconds a byte of the slowest level in it, latency of its longest hop; and seconds a byte
        where each rank sends to all others directly."""
        links = self.machine.link
        members = [min(group.size, max(1, link.unit // group.stride)) for link in links]
        units = [-(-group.size // count) for count in members] + [1]
        crossed = [n for n in range(len(links)) if units[n] > units[n + 1]]
        latency = sum(links[n].latency * (units[n] - units[n + 1]) for n in crossed)
        share = {n: links[n].unit / links[n].bandwidth for n in crossed}  # seconds a byte of each rank of a unit
        outward = max((group.size - members[n]) / group.size * share[n] for n in crossed)
        per_byte = max(share[n] / links[n].direct / members[n] for n in crossed)
        return latency, per_byte, max(links[n].latency for n in crossed), outward


def interpolate(table: Measured, nbytes: float) -> float:
    """Seconds, linear between logarithms; beyond the table at its last rate, below it its first value.

    >>> table = Measured("message", 2, (10.0, 1000.0), (1.0, 4.0))
    >>> [interpolate(table, n) for n in (1, 10, 100, 1000, 2000)]
    [1.0, 1.0, 2.0, 4.0, 8.0]
    """
    sizes, seconds = table.bytes, table.seconds
    if nbytes <= sizes[0]:
        return seconds[0]
    if nbytes >= sizes[-1]:
        return seconds[-1] * nbytes / sizes[-1]
    right = bisect.bisect_right(sizes, nbytes)
    part = math.log(nbytes / sizes[right - 1]) / math.log(sizes[right] / sizes[right - 1])
    return round(seconds[right - 1] * (seconds[right] / seconds[right - 1]) ** part, 15)
