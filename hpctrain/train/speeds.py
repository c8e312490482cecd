"""Do ranks with the same work take the same time?"""

from __future__ import annotations

import statistics

import torch

from hpctrain import comm
from hpctrain.grid import Grid


class Speeds:
    """Seconds that each rank spends in work of its own, outside communication. The last `idle` ranks of the data axis,
    which have no part of the batch, are compared with each other."""

    def __init__(self, grid: Grid, ratio: float, idle: int = 0):
        self.grid, self.ratio, self.working = grid, ratio, grid.data.size - idle
        self._own, self._steps = 0.0, 0

    def add(self, seconds: float) -> None:
        """A step took so long, of which the ledger says how much was communication."""
        self._own += max(0.0, seconds - sum(self.grid.transport.traffic.seconds().values()))
        self._steps += 1

    def slow(self) -> list[str]:
        """This rank, if it took `ratio` times as long as the median of the others of its stage with the same work,
        since the last call. Collective over data and tensor axes."""
        grid, mean = self.grid, self._own / max(1, self._steps)
        self._own, self._steps = 0.0, 0
        peers = comm.all_gather(comm.all_gather(torch.tensor([mean], dtype=torch.float64), grid.tensor), grid.data)
        alike = slice(self.working) if grid.data.rank < self.working else slice(self.working, None)
        others = peers.view(grid.data.size, -1)[alike].flatten().tolist()
        others.remove(mean)
        usual = statistics.median(others) if others else mean
        if not self.ratio or mean <= self.ratio * usual:
            return []
        return [f"its own work takes {mean:.3g} s a step, that of the others of its stage {usual:.3g} s"]
