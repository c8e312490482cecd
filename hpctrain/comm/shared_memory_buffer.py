"""A flat tensor on every rank of a node, each within every rank's reach, and sums in place over all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hpctrain.comm.buffers import REDUCED_HERE
from hpctrain.comm.windows import Window, add_up
from hpctrain.grid import Axis
from hpctrain.shard import split

STEP = 1 << 15  # elements summed at a time, so that all of the ranks' are still in the cache when the sum is written


class SharedMemoryBuffer:
    """`numel` elements on every rank of an axis that is on one node. Its creation is collective.

    Attributes: `local`, this rank's tensor, initially zero, `all`, everybody's in rank order, and their `window`.
    """

    def __init__(self, axis: Axis, numel: int, dtype: torch.dtype):
        self.axis = axis
        nbytes = numel * dtype.itemsize
        self.window = Window(axis, nbytes)
        self.all = [part[:nbytes].view(dtype) for part in self.window.parts]
        self.local = self.all[axis.rank]
        self.local.zero_()
        part = split(numel, axis.size, axis.rank)
        # NumPy's calls take half as long as torch's, and a view takes as long to make as a small sum
        self._add: Callable[[Any, Any], object] = add_up if dtype in REDUCED_HERE else _add
        memory: list = self.all if dtype in REDUCED_HERE else [part.numpy() for part in self.all]
        self._steps = [
            [each[start : min(start + STEP, part.stop)] for each in memory]
            for start in range(part.start, part.stop, STEP)
            if axis.size > 1
        ]

    def free(self) -> None:
        """Give the memory back before the grid does: nothing may read it any more. Collective."""
        self.axis.transport.resources.remove(self.window)
        self.window.free()

    def sum(self) -> None:
        """Replace every rank's tensor by the sum over all, taken in rank order; 16-bit floats are summed in float32.
        Not in the ledger."""
        add = self._add
        self.window.barrier()
        for places in self._steps:
            first = places[0]
            add(places, first)
            for place in places[1:]:
                place[...] = first
        self.window.barrier()

    def sum_own(self) -> None:
        """Replace this rank's part of its tensor by the sum of all, after a barrier. Not in the ledger."""
        for places in self._steps:
            self._add(places, places[self.axis.rank])


def _add(parts: Sequence[np.ndarray], out: np.ndarray) -> None:
    """The sum of arrays, in order, written to `out`, which may be one of them."""
    total, *rest, last = parts
    for part in rest:  # in place where it can be: the fewer arrays, the more of them stay in the cache
        total = np.add(total, part, out if total is out else None)
    np.add(total, last, out)
