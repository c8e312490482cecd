"""Panels: the steps of a product over two axes.

A dim that is cut over two axes is multiplied panel by panel, each of which is whole on one rank of either axis. At
every step a rank receives the next panel's operands (`operands`) while it multiplies this one's, and sends partial
products to the rank they belong to (`results`). Where an axis lies on one node nothing is sent: panels are read in
place, in shared memory, and where all axes do, one product does for all panels.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Sequence
from typing import NamedTuple, TypeVar

import torch

from hpctrain.grid import Axis

T = TypeVar("T")


class Panel(NamedTuple):
    """Places [at, at + width) of a dim; on axis a of the two, rank owner[a] holds them, from its own place start[a]."""

    at: int
    width: int
    owner: tuple[int, int]
    start: tuple[int, int]


@functools.lru_cache(1024)
def panels(over_first: tuple[int, ...], over_second: tuple[int, ...]) -> tuple[Panel, ...]:
    """The common refinement of two partitions of a dim, without empty panels.

    >>> [tuple(panel) for panel in panels((2, 4), (3, 3))]
    [(0, 2, (0, 0), (0, 0)), (2, 1, (1, 0), (0, 2)), (3, 3, (1, 1), (1, 0))]
    """
    cuts = [list(itertools.accumulate(sizes, initial=0)) for sizes in (over_first, over_second)]
    if cuts[0][-1] != cuts[1][-1]:
        raise ValueError(f"sizes must be two partitions of one dim, got {over_first} and {over_second}")
    found = []
    for at, stop in itertools.pairwise(sorted({*cuts[0], *cuts[1]})):
        # of several ranks that begin here, all but the last hold nothing
        first, second = (max(r for r in range(len(cut) - 1) if cut[r] <= at) for cut in cuts)
        found.append(Panel(at, stop - at, (first, second), (at - cuts[0][first], at - cuts[1][second])))
    return tuple(found)


@functools.lru_cache(4096)
def rotated(steps: tuple[T, ...], turn: int, turns: int) -> tuple[T, ...]:
    """The steps, begun `turn` of `turns` equal parts of the way.

    >>> rotated(("a", "b", "c", "d"), 1, 2)
    ('c', 'd', 'a', 'b')
    """
    first = turn % turns * len(steps) // turns
    return (*steps[first:], *steps[:first])


class Scratch:
    """Memory that every call uses again, by name."""

    def __init__(self) -> None:
        self._flat: dict[tuple[Hashable, torch.dtype, torch.device], torch.Tensor] = {}

    def take(self, name: Hashable, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """Uninitialised memory, of the dtype and device of `like`."""
        key = name, like.dtype, like.device
        flat, numel = self._flat.get(key), shape[0] * shape[1]
        if flat is None or flat.numel() < numel:
            flat = self._flat[key] = like.new_empty(numel)
        return flat[:numel].view(shape)


def in_place(axis: Axis, block: torch.Tensor) -> bool:
    """Whether the axis's blocks are within this rank's reach."""
    return axis.size == 1 or (axis.one_node and block.is_cpu)
