"""What of a training job goes into a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from hpctrain.data_parallel import DataParallelStrategy
from hpctrain.grid import Grid
from hpctrain.parameter import annotate
from hpctrain.shard import Shard
from hpctrain.shard_entries import Described, Entry


class TrainingState:
    """The parameters of a model, the buffers that `state_dict()` has, such as running statistics, and the state of the
    optimizer, wherever the strategy has them. Collective, as stages of a pipeline may have the same buffer.

    Attributes: `names` of parameters.
    """

    def __init__(self, model: torch.nn.Module, strategy: DataParallelStrategy):
        self.strategy = strategy
        # tied parameters have one name, that of the stage which counts them
        self.names = {p: getattr(p, "same_as", name) for name, p in model.named_parameters()}
        self._model, self._shards = model, dict(_shards_of_buffers(model, strategy.grid))

    def to_save(self) -> list[Entry]:
        return self.strategy.to_save(self.names | self._buffers())

    def to_load(self, saved: dict[str, Described]) -> list[Entry]:
        return self.strategy.to_load(self.names | self._buffers(), saved)

    def loaded(self) -> None:
        self.strategy.loaded()

    def _buffers(self) -> dict[torch.nn.Parameter, str]:
        """As parameters that are not trained, in the memory that they have now: a module may give them other."""
        buffers = {name: self._model.get_buffer(name).detach() for name in self._shards}
        made = {name: torch.nn.Parameter(buffer, requires_grad=False) for name, buffer in buffers.items()}
        return {annotate(each, shard=self._shards[name]): name for name, each in made.items()}


def _shards_of_buffers(model: torch.nn.Module, grid: Grid) -> Iterator[tuple[str, Shard]]:
    """A layer that divides its own says so by `shard`; others are whole on every rank."""
    kept = model.state_dict(keep_vars=True)
    found = {name: each for name, each in model.named_buffers() if name in kept and not each.is_meta}
    stages = grid.pipeline.comm.allgather(set(found)) if grid.pipeline.size > 1 else []
    for name, buffer in found.items():
        shard = getattr(model.get_submodule(name.rpartition(".")[0]), "shard", None)
        if not isinstance(shard, Shard) or shard.shape != buffer.shape:
            shard = Shard.whole(buffer.shape, replicated=("x", "y", "z"))
        holders = tuple(rank for rank, names in enumerate(stages) if name in names)
        yield name, dataclasses.replace(shard, holders=holders if len(holders) > 1 else ())
