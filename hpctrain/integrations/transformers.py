"""Hugging Face's Trainer on a grid of replicas and tensor axes.

model = ht.parallelize(model, grid, zero=0)
trainer = GridTrainer(model, TrainingArguments("out"), grid=grid, train_dataset=data)
trainer.train()
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers

from hpctrain import comm
from hpctrain.convert import gather_state_dict
from hpctrain.convert.pretrained import whole_prompts
from hpctrain.grid import Grid
from hpctrain.integrations.accelerate import as_replica, join_grid, on_grid
from hpctrain.integrations.states import check_one_writer, loads_whole, saves_whole
from hpctrain.shard import check_shards


class GridTrainer(transformers.Trainer):
    """A Trainer for a model that `ht.parallelize` divided over a grid of replicas and tensor axes.

    A replica is what is a process elsewhere: batches and metrics are shared out among replicas. Every rank clips by the
    norm of the whole gradient, and logs the same loss. The first rank writes files: whole weights, which
    `from_pretrained` loads, and the whole state of the optimizer, with which a run is resumed on any grid, or by
    Hugging Face's own Trainer. On GPUs each rank is to see one; CUDA_VISIBLE_DEVICES= keeps to the processor, for which
    `use_cpu=True` would start torch.distributed when the arguments are made.

    Args:
        grid: of replicas and tensor axes.
        arguments, options: of transformers.Trainer.

    Raises:
        ValueError: on every rank, for a grid with stages, with replicas for a model without zero=0, 1 or 2, for a model
            to save with weights that parallelize has not seen, where the arguments start torch.distributed
            (`use_cpu=True` under mpirun) or use several GPUs, and for `save_on_each_node` and `enable_jit_checkpoint`.
    """

    current_flos: float
    _whole: dict[str, torch.Tensor] | None = None  # while the model is saved: its weights, on the first rank

    def __init__(self, *arguments: Any, grid: Grid, **options: Any):
        self.grid = grid
        super().__init__(*arguments, **options)
        if self.args.save_strategy != "no":
            check_shards(self.model)  # which could not be saved

    def create_accelerator_and_postprocess(self) -> None:
        join_grid(self.grid)
        with comm.together(self.grid.world):
            if self.args.n_gpu > 1:
                raise ValueError(f"a rank works on one GPU, but sees {self.args.n_gpu}; set CUDA_VISIBLE_DEVICES")
            check_one_writer(self.args.save_on_each_node)
            if getattr(self.args, "enable_jit_checkpoint", False):  # older releases have none
                raise ValueError(
                    "enable_jit_checkpoint=True: ranks hear of a signal at different steps, and would wait for each "
                    "other; leave it out, and save by save_steps"
                )
        super().create_accelerator_and_postprocess()
        on_grid(self.accelerator, self.grid)
        self.gather_function = functools.partial(
            self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )

    def _get_dataloader(self, *arguments, **options):
        """Its workers draw the same numbers on every rank of a replica."""
        with as_replica(self.grid):
            return super()._get_dataloader(*arguments, **options)

    def _maybe_log_save_evaluate(self, tr_loss: torch.Tensor, *arguments, **options) -> None:
        if self.control.should_log:
            tr_loss.copy_(self.accelerator.gather(tr_loss).mean())
        super()._maybe_log_save_evaluate(tr_loss, *arguments, **options)

    def store_flos(self) -> None:
        self.current_flos = sum(comm.all_gather_object(self.current_flos, self.grid.replica))
        super().store_flos()

    def _save_checkpoint(self, *arguments, **options):
        super()._save_checkpoint(*arguments, **options)
        self.grid.comm.Barrier()  # nobody reads it before it is there

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        self._whole = gather_state_dict(self.model, self.grid)  # here, as some versions call _save on one rank alone
        try:
            with whole_prompts(self.model, self._whole), comm.together(self.grid.world):
                super().save_model(output_dir, _internal_call)
        finally:
            self._whole = None

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        super()._save(output_dir, self._whole if state_dict is None else state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with saves_whole(self.model, self.optimizer.optimizer, self.grid), comm.together(self.grid.world):
            super()._save_optimizer_and_scheduler(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with loads_whole(self.model, self.optimizer.optimizer, self.grid):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _save_rng_state(self, output_dir: str) -> None:
        if self.grid.tensor.rank == 0:  # all ranks of a replica have the same
            with as_replica(self.grid):
                super()._save_rng_state(output_dir)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with as_replica(self.grid):
            super()._load_rng_state(checkpoint)
