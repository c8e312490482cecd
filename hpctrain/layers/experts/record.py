"""What a layer of experts notes of a step: the load of its experts, and its auxiliary losses."""

from __future__ import annotations

import torch

from hpctrain import comm
from hpctrain.grid import Grid


class Record:
    """On this rank, since `clear`; in training alone, and of what is computed once more once.

    Attributes:
        counts: (experts + 1,) int64: how many pairs of a token and an expert each expert was chosen for, and in the
            last place those that were dropped.
        losses: (2,) float64: the auxiliary loss and the z-loss, as they count in the step's scaled loss.
    """

    def __init__(self, grid: Grid, experts: int):
        self._grid = grid
        self._parts: torch.Tensor | None = None
        self.counts = torch.zeros(experts + 1, dtype=torch.int64)
        self.losses = torch.zeros(2, dtype=torch.float64)

    def add_counts(self, counts: torch.Tensor) -> None:
        """Raises ValueError, on all ranks of the stage, where `parts_of_step` was asked for already."""
        if self._parts is not None:
            raise ValueError(
                'aux_scope = "step" wants all forwards of a step before its first backward, and LoadBalance.finish_step'
                " after it; use one microbatch, the schedule gpipe, or aux_scope = sequence"
            )
        self.counts = self.counts.to(counts.device)  # where the layer computes, known with its first tokens
        self.counts[: len(counts)].add_(counts)

    def add_dropped(self, dropped: int) -> None:
        self.counts[-1].add_(dropped)

    def add_losses(self, losses: torch.Tensor) -> None:
        self.losses = self.losses.to(losses.device)
        self.losses += losses.detach()

    def parts_of_step(self) -> torch.Tensor:
        """(experts,) float64: the part of the step's pairs, over all ranks of the stage, that each expert was chosen
        for. Collective over the stage when first asked for in a step."""
        if self._parts is None:
            counts = self.counts[:-1].clone()
            for axis in (self._grid.expert, self._grid.copies):
                counts = comm.all_reduce(counts, axis)
            self._parts = counts.double() / counts.sum().clamp_min(1)
        return self._parts

    def clear(self) -> None:
        self._parts = None
        self.counts.zero_()
        self.losses.zero_()
