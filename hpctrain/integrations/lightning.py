"""Lightning on a tensor grid.

class Module(lightning.pytorch.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = ht.parallelize(make_model(), grid)
    ...

trainer = lightning.pytorch.Trainer(strategy=GridStrategy(grid), gradient_clip_val=1.0)
trainer.fit(Module(), loader)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from hpctrain import comm
from hpctrain.comm.watchdog import PATIENCE
from hpctrain.convert import gather_optimizer_state, gather_state_dict, load_optimizer_state
from hpctrain.grid import Grid
from hpctrain.integrations.states import check_grid, local_rank
from hpctrain.shard import check_shards


class GridStrategy(SingleDeviceStrategy):
    """A strategy for modules whose weights `ht.parallelize` divided over a tensor grid.

    Every rank is given the same batches, and clips by the norm of the whole gradient. Checkpoints are whole, written by
    the first rank, and resumed on any grid or by one process without this strategy.

    Args:
        grid: of tensor axes.
        options: of lightning.pytorch.strategies.Strategy.

    Raises:
        ValueError: on every rank, for a grid with replicas or stages; by `trainer.fit` for a module to save with
            weights that parallelize has not seen, and for Lightning's own requeueing of Slurm's jobs.
    """

    strategy_name = "grid"

    def __init__(self, grid: Grid, **options: Any):
        check_grid(grid, "Lightning")
        super().__init__(comm.local_device("auto", grid.comm), **options)
        self.grid = grid
        self.global_rank, self.local_rank = grid.rank, local_rank(grid)
        rank_zero_only.rank = grid.rank  # who logs

    def setup(self, trainer: Trainer) -> None:
        environment = trainer._accelerator_connector.cluster_environment  # as Lightning asks for it
        with comm.together(self.grid.world):
            if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
                raise ValueError(
                    "Lightning requeues jobs of Slurm by saving in a signal's handler, at another step on each rank; "
                    "turn that off by plugins=[SLURMEnvironment(auto_requeue=False)] of the Trainer"
                )
            if trainer.state.fn == TrainerFn.FITTING and trainer.checkpoint_callbacks:
                check_shards(self.lightning_module)  # what could not be saved
        super().setup(trainer)

    @property
    def is_global_zero(self) -> bool:
        return self.grid.rank == 0

    def barrier(self, *arguments: Any, **options: Any) -> None:
        comm.agree(self.grid.world, None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return comm.all_gather_object(obj if self.grid.rank == src else None, self.grid.world, PATIENCE)[src]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        decisions = comm.all_gather_object(bool(decision), self.grid.world, PATIENCE)
        return min(decisions) if all else max(decisions)

    def lightning_module_state_dict(self) -> dict[str, torch.Tensor]:
        return gather_state_dict(self.lightning_module, self.grid)

    def save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        with comm.together(self.grid.world):
            super().save_checkpoint(*arguments, **options)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return gather_optimizer_state(self.lightning_module, getattr(optimizer, "_optimizer", optimizer), self.grid)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"]):
            load_optimizer_state(self.lightning_module, optimizer, state, self.grid)
