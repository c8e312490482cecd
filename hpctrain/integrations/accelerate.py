"""Hugging Face's accelerate on a tensor grid.

    accelerator = GridAccelerator(grid, gradient_accumulation_steps=2)
    model = ht.parallelize(model, grid)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

The rest of the script stays as it is.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.utils import MODEL_NAME, SAFE_MODEL_NAME
from safetensors.torch import load_file

from hpctrain import comm
from hpctrain.convert import gather_state_dict
from hpctrain.grid import Grid
from hpctrain.integrations.states import check_grid, loads_whole, local_rank, saves_whole


def join_grid(grid: Grid) -> None:
    """Tell accelerate that this process works alone, but is the main one on the first rank only.

    Raises:
        ValueError: on every rank, where the grid has replicas or stages, or accelerate started torch.distributed.
    """
    check_grid(grid, "accelerate")
    state = accelerate.PartialState()
    with comm.together(grid.comm):
        if state.num_processes > 1:
            raise ValueError(
                f"accelerate has started torch.distributed for {state.num_processes} processes, which would take the "
                "ranks of a tensor axis for replicas; leave out cpu=True, use_cpu=True, ACCELERATE_USE_CPU and "
                "LOCAL_RANK, so that each rank is one process to it"
            )
    state.process_index, state.local_process_index = grid.rank, local_rank(grid)


class GridAccelerator(accelerate.Accelerator):
    """An Accelerator for models that `ht.parallelize` divided over a tensor grid.

    `backward`, `clip_grad_norm_`, accumulation and mixed precision are its own. `save_state` and `save_model` write
    whole weights and optimizer states, on the first rank, `get_state_dict` returns whole weights there, and
    `load_state` takes them on any grid. All of these are collective: every rank calls them.

    Args:
        grid: of tensor axes.
        options: of accelerate.Accelerator.
    """

    def __init__(self, grid: Grid, **options: Any):
        join_grid(grid)
        super().__init__(**options)
        self.grid = grid
        self._saved: dict[int, dict] | None = None  # while the first rank saves: the weights of each model
        self.register_load_state_pre_hook(_load_models)

    def wait_for_everyone(self) -> None:
        if self._saved is None:
            self.grid.comm.Barrier()

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        if self._saved is not None:
            return self._saved[id(model)]
        if not any(hasattr(parameter, "shard") for parameter in model.parameters()):
            return super().get_state_dict(model, unwrap)
        return OrderedDict(gather_state_dict(self.unwrap_model(model) if unwrap else model, self.grid))

    def save_state(self, *arguments: Any, **options: Any) -> str:
        saved = {id(model): self.get_state_dict(model, unwrap=False) for model in self._models}
        folder = None
        with self._each_optimizer(saves_whole), comm.together(self.grid.comm):
            self._saved = saved
            try:
                if self.grid.rank == 0:
                    folder = super().save_state(*arguments, **options)
            finally:
                self._saved = None
        if self.grid.rank:
            self.project_configuration.iteration += 1
        return self.grid.comm.bcast(folder)

    def load_state(self, *arguments: Any, **options: Any) -> None:
        own, self.state.process_index = self.state.process_index, 0  # whose generators all ranks go on with
        try:
            with self._each_optimizer(loads_whole):
                super().load_state(*arguments, **options)
        finally:
            self.state.process_index = own

    @contextlib.contextmanager
    def _each_optimizer(self, whole):
        with contextlib.ExitStack() as stack:
            for prepared in self._optimizers:
                weight = prepared.param_groups[0]["params"][0]
                models = [model for model in self._models if any(p is weight for p in model.parameters())]
                if models and hasattr(weight, "shard"):
                    stack.enter_context(whole(models[0], prepared.optimizer, self.grid))
            yield


def _load_models(models: list[torch.nn.Module], folder: str) -> None:
    """In the place of accelerate's way, which looks for shared weights by their addresses."""
    for number, model in enumerate(models):
        ending = f"_{number}" * (number > 0)
        path = Path(folder) / f"{SAFE_MODEL_NAME}{ending}.safetensors"
        state = load_file(path) if path.exists() else torch.load(Path(folder) / f"{MODEL_NAME}{ending}.bin")
        own = model.state_dict(keep_vars=True)
        names = {id(own[name]): name for name in state if name in own}
        for name, tensor in own.items():  # of shared weights, a file has one name
            if name not in state and id(tensor) in names:
                state[name] = state[names[id(tensor)]]
        model.load_state_dict(state)
    models.clear()
