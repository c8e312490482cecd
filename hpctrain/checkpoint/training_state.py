"""What of a training job goes into a checkpoint."""

from __future__ import annotations

import torch

from hpctrain.data_parallel import DataParallelStrategy
from hpctrain.shard_entries import Described, Entry


class TrainingState:
    """The parameters of a model and the state of its optimizer, wherever the strategy has them."""

    def __init__(self, model: torch.nn.Module, strategy: DataParallelStrategy):
        self.strategy = strategy
        # tied parameters have one name, that of the stage which counts them
        self.names = {p: getattr(p, "same_as", name) for name, p in model.named_parameters()}

    def to_save(self) -> list[Entry]:
        return self.strategy.to_save(self.names)

    def to_load(self, saved: dict[str, Described]) -> list[Entry]:
        return self.strategy.to_load(self.names, saved)

    def loaded(self) -> None:
        self.strategy.loaded()
