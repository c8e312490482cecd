"""Numbers of whole gradients, from what every rank has of its parts. Collective."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hpctrain import comm
from hpctrain.convert.part import Part
from hpctrain.grid import Grid


def norms_of_all(own: torch.Tensor, parts: Sequence[Part], order: float) -> torch.Tensor:
    """Norms of gradients, float64, from those of this rank's parts."""
    power = order != 0 and math.isfinite(order)
    op = "sum" if math.isfinite(order) else "max" if order > 0 else "min"
    totals = own.pow(order) if power else own
    for axis in dict.fromkeys(axis for part in parts for axis in part.axes):
        over = torch.tensor([axis in part.axes for part in parts])
        totals[over] = comm.all_reduce(totals[over], axis, op)
    return totals.pow(1 / order) if power else totals


def agree_on_overflow(found: torch.Tensor, grid: Grid) -> None:
    """torch.amp.GradScaler leaves out a step on all ranks, or on none."""
    for axis in (grid.tensor, grid.data):
        comm.all_reduce(found, axis, "max")


def all_agree(same: bool, part: Part | None) -> bool:
    """Whether `same` is true on every rank that has a part."""
    flag = torch.tensor([float(same)])
    for axis in part.axes if part else ():
        flag = comm.all_reduce(flag, axis, "min")
    return bool(flag)
