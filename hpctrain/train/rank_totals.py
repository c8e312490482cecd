"""What each rank spent and moved in a job: ranks.json in the run folder, for `hpctrain report`."""

from __future__ import annotations

import socket
from collections import Counter
from typing import Any

import torch

from hpctrain.grid import Grid
from hpctrain.resident import most_resident


class RankTotals:
    """Of this rank, over the steps of this job."""

    def __init__(self):
        self.steps = 0
        self._parts: dict[str, Counter[str]] = {part: Counter() for part in ("time", "bytes_sent", "bytes_received")}

    def add(self, record: dict[str, Any]) -> None:
        """A step's line of metrics, as this rank has it."""
        self.steps += 1
        for part, total in self._parts.items():
            total.update(record[part])

    def described(self, grid: Grid, device: torch.device) -> dict[str, Any]:
        """Seconds by part, bytes by axis, and the most memory that the process has had, in bytes."""
        on_device = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        return {
            "rank": grid.rank, "host": socket.gethostname(), "coords": {axis: grid.coords[axis] for axis in grid.shape},
            "steps": self.steps,
            **{part: dict(total) for part, total in self._parts.items()},
            "memory": most_resident(), "device_memory": on_device,
        }  # fmt: skip
