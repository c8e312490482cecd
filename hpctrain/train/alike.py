"""Do ranks that hold the same weights hold the same bits, and do those with the same work take the same time?"""

from __future__ import annotations

import statistics
from collections import Counter

import torch

from hpctrain import comm
from hpctrain.digest import digest
from hpctrain.grid import Grid
from hpctrain.parameter import shard_of


def differing(names: dict[torch.nn.Parameter, str], grid: Grid) -> list[str]:
    """Parameters that differ between this rank and those that hold the same slice on other ranks of the data axis (of
    experts, on other copies), or of tensor axes. Collective over the grid."""
    groups: dict[str, tuple] = {}
    for p in names:
        shard = shard_of(p)
        groups.setdefault(shard.alike, (grid.alike(shard), []))[1].append(p)
        axes = [axis for axis in shard.replicated if grid.shape[axis] > 1]
        if axes:
            plane = grid.plane(*axes)
            groups.setdefault(plane.name, (plane, []))[1].append(p)
    problems = []
    for name in sorted(groups):
        axis, parameters = groups[name]
        mine = torch.stack([digest(p) for p in parameters]).cpu()[None]
        everybody = comm.all_gather(mine, axis)
        for place in (everybody != everybody[0]).any(0).nonzero().flatten().tolist():
            problems.append(_said(names[parameters[place]], everybody[:, place].tolist(), grid.members(axis.name)))
    return problems


def _said(parameter: str, digests: list[int], members: list[int]) -> str:
    (usual, count), *others = Counter(digests).most_common()
    if others and others[0][1] == count:  # no majority
        groups = [[r for r, d in zip(members, digests) if d == value] for value in dict.fromkeys(digests)]
        return f"{parameter} differs between rank " + " and rank ".join(", ".join(map(str, g)) for g in groups)
    odd = [str(r) for r, d in zip(members, digests) if d != usual]
    return f"{parameter} of rank {', '.join(odd)} differs from that of the other {count} ranks with the same slice"


class Speeds:
    """Seconds that each rank spends in work of its own, outside communication."""

    def __init__(self, grid: Grid, ratio: float):
        self.grid, self.ratio = grid, ratio
        self._own, self._steps = 0.0, 0

    def add(self, seconds: float) -> None:
        """A step took so long, of which the ledger says how much was communication."""
        self._own += max(0.0, seconds - sum(self.grid.transport.traffic.seconds().values()))
        self._steps += 1

    def slow(self) -> list[str]:
        """This rank, if it took `ratio` times as long as the median of the others of its stage, since the last call.
        Collective over data and tensor axes."""
        grid, mean = self.grid, self._own / max(1, self._steps)
        self._own, self._steps = 0.0, 0
        peers = comm.all_gather(comm.all_gather(torch.tensor([mean], dtype=torch.float64), grid.tensor), grid.data)
        others = peers.tolist()
        others.remove(mean)
        usual = statistics.median(others) if others else mean
        if not self.ratio or mean <= self.ratio * usual:
            return []
        return [f"its own work takes {mean:.3g} s a step, that of the others of its stage {usual:.3g} s"]
