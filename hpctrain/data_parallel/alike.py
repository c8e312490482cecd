"""Do ranks that hold the same weights hold the same bits?"""

from __future__ import annotations

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
