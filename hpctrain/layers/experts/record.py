"""What a layer of experts notes of a step: the load of its experts, and its auxiliary losses."""

from __future__ import annotations

import torch


class Record:
    """On this rank, since `clear`; in training alone, and of what is computed once more once.

    Attributes:
        counts: (experts + 1,) int64: how many pairs of a token and an expert each expert was chosen for, and in the
            last place those that were dropped.
        losses: (2,) float64: the auxiliary loss and the z-loss, as they count in the step's scaled loss.
    """

    def __init__(self, experts: int):
        self.counts = torch.zeros(experts + 1, dtype=torch.int64)
        self.losses = torch.zeros(2, dtype=torch.float64)

    def add_counts(self, counts: torch.Tensor) -> None:
        self.counts = self.counts.to(counts.device)  # where the layer computes, known with its first tokens
        self.counts[: len(counts)] += counts

    def add_dropped(self, dropped: torch.Tensor) -> None:
        self.counts = self.counts.to(dropped.device)
        self.counts[-1] += dropped

    def add_losses(self, losses: torch.Tensor) -> None:
        self.losses = self.losses.to(losses.device)
        self.losses += losses.detach()

    def clear(self) -> None:
        self.counts.zero_()
        self.losses.zero_()
