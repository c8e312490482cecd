"""Lightning on a grid of replicas and tensor axes.

class Module(lightning.pytorch.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = ht.parallelize(make_model(), grid, zero=0)
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
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torchmetrics import Metric

from hpctrain import comm
from hpctrain.comm.watchdog import PATIENCE
from hpctrain.convert import gather_optimizer_state, gather_state_dict, load_optimizer_state
from hpctrain.grid import Grid
from hpctrain.integrations import replicas
from hpctrain.integrations.states import check_averaged, check_grid, local_rank
from hpctrain.shard import check_shards


class GridStrategy(ParallelStrategy):
    """A strategy for modules whose weights `ht.parallelize` divided over a grid of replicas and tensor axes.

    A replica is what is a process elsewhere: `global_rank` and `world_size`, samplers, `self.log(sync_dist=True)`,
    `self.all_gather` and torchmetrics are those of replicas. Every rank clips by the norm of the whole gradient.
    Checkpoints are whole, written by the first rank, and resumed on any grid or by one process without this strategy.

    Args:
        grid: of replicas and tensor axes.
        options: of lightning.pytorch.strategies.Strategy.

    Raises:
        ValueError: on every rank, for a grid with stages or shared sequences; by `trainer.fit` for a module to save
            with weights that parallelize has not seen, with replicas for optimizers of weights that nobody averages,
            that zero=3 spreads or of several models with zero=1 or 2, and for Lightning's own requeueing of Slurm's
            jobs.
    """

    strategy_name = "grid"

    def __init__(self, grid: Grid, **options: Any):
        check_grid(grid, "Lightning")
        super().__init__(parallel_devices=[comm.local_device("auto", grid.comm)], **options)
        self.grid = grid
        rank_zero_only.rank = grid.rank  # who logs

    @property
    def root_device(self) -> torch.device:
        return self.parallel_devices[0]

    @property
    def global_rank(self) -> int:
        return self.grid.replica.rank

    @property
    def world_size(self) -> int:
        return self.grid.replica.size

    @property
    def local_rank(self) -> int:
        return local_rank(self.grid)

    @property
    def node_rank(self) -> int:
        nodes = self.grid.world.nodes
        return sorted({*nodes}).index(nodes[self.grid.rank])

    @property
    def is_distributed(self) -> bool:
        """Whether samplers are divided."""
        return self.world_size > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

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
        with comm.together(self.grid.world):
            check_averaged([group for optimizer in self.optimizers for group in optimizer.param_groups], self.grid)
        for module in self.lightning_module.modules():
            if isinstance(module, Metric) and self.is_distributed:
                module.dist_sync_fn, module.distributed_available_fn = self._gather_state, lambda: True

    def _gather_state(self, tensor: torch.Tensor, group: None = None) -> list[torch.Tensor]:
        """Of a metric, from each replica; they may be of different lengths."""
        return [each.to(tensor.device) for each in comm.all_gather_object(tensor.cpu(), self.grid.replica)]

    def model_to_device(self) -> None:
        self.model.to(self.root_device)

    def reduce(self, tensor: Any, group: None = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        name = str(reduce_op).rpartition(".")[2].lower()  # of torch.distributed.ReduceOp.SUM
        return replicas.reduce(tensor, self.grid.replica, "mean" if name == "avg" else name)

    def all_gather(self, tensor: torch.Tensor, group: None = None, sync_grads: bool = False) -> torch.Tensor:
        """One row for each replica; of a single one the tensor itself."""
        if not self.is_distributed:
            return tensor
        if sync_grads:
            return comm.functional.all_gather(tensor[None], self.grid.replica)
        return replicas.gather(tensor[None], self.grid.replica)

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
