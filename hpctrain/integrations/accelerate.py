"""Hugging Face's accelerate on a tensor grid.

    accelerator = GridAccelerator(grid, gradient_accumulation_steps=2)
    model = ht.parallelize(model, grid)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

The rest of the script stays as it is.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.utils import MODEL_NAME, SAFE_MODEL_NAME
from safetensors.torch import load_file

from hpctrain import comm
from hpctrain.convert import gather_state_dict
from hpctrain.grid import Grid
from hpctrain.integrations.states import check_grid, check_one_writer, loads_whole, local_rank, saves_whole


def join_grid(grid: Grid) -> None:
    """Tell accelerate that this process works alone, but is the main one on the first rank only.

    Raises:
        ValueError: on every rank, where the grid has replicas or stages, or accelerate started torch.distributed.
    """
    check_grid(grid, "accelerate")
    state = accelerate.PartialState()
    with comm.together(grid.world):
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
    `load_state` takes them on any grid. All of these, and `check_trigger`, are collective: every rank calls them. Hooks
    of saving and loading run on every rank; `weights`, which the former are given, are empty but on the first. Every
    rank reads all batches, those of iterable datasets too; trackers are the first rank's.

    Args:
        grid: of tensor axes.
        options: of accelerate.Accelerator.

    Raises:
        ValueError: on every rank, for `save_on_each_node`, and as `join_grid`.
    """

    log_with: list
    flag_tensor: torch.Tensor | None
    _save_model_state_pre_hook: OrderedDict[int, Callable]

    def __init__(self, grid: Grid, **options: Any):
        join_grid(grid)
        super().__init__(**options)
        with comm.together(grid.world):
            check_one_writer(self.project_configuration.save_on_each_node)
        self.grid = grid
        self._saved: dict[int, dict] | None = None  # while the first rank saves: the weights of each model
        self.dataloader_config.dispatch_batches = False  # else the first rank alone would read an iterable dataset
        if grid.rank:
            self.log_with = []

    @property
    def is_last_process(self) -> bool:
        return self.grid.rank == self.grid.size - 1

    def on_main_process(self, function: Callable | None = None) -> Callable:
        return _only(self.is_main_process, function)

    def on_local_main_process(self, function: Callable | None = None) -> Callable:
        return _only(self.is_local_main_process, function)

    def on_last_process(self, function: Callable | None = None) -> Callable:
        return _only(self.is_last_process, function)

    def on_process(self, function: Callable | None = None, process_index: int | None = None) -> Callable:
        return _only(self.process_index == process_index, function)

    def on_local_process(self, function: Callable | None = None, local_process_index: int | None = None) -> Callable:
        return _only(self.local_process_index == local_process_index, function)

    def main_process_first(self) -> contextlib.AbstractContextManager[None]:
        return self._first(self.is_main_process)

    def local_main_process_first(self) -> contextlib.AbstractContextManager[None]:
        return self._first(self.is_local_main_process)

    @contextlib.contextmanager
    def _first(self, here: bool) -> Iterator[None]:
        if not here:
            self.wait_for_everyone()
        yield
        if here:
            self.wait_for_everyone()

    def wait_for_everyone(self) -> None:
        if self._saved is None:
            self.grid.comm.Barrier()

    def check_trigger(self) -> bool:
        found = any(self.grid.comm.allgather(self.flag_tensor is not None and bool(self.flag_tensor)))
        if found:
            self.flag_tensor = None
        return found

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        if self._saved is not None:
            return self._saved[id(model)]
        if not any(hasattr(parameter, "shard") for parameter in model.parameters()):
            return super().get_state_dict(model, unwrap)
        return OrderedDict(gather_state_dict(self.unwrap_model(model) if unwrap else model, self.grid))

    def save_state(self, *arguments: Any, **options: Any) -> Path:
        weights = {id(model): self.get_state_dict(model, unwrap=False) for model in self._models}
        hooks, came = self._save_model_state_pre_hook, []

        def run_hooks(models, states, folder):
            """On every rank, as they may gather, where the first one comes to them; or not at all, without a folder."""
            came.append(folder := self.grid.comm.bcast(folder))
            saved, self._saved = self._saved, None
            try:
                for hook in hooks.values() if folder else ():
                    with comm.together(self.grid.world):
                        hook(models, states, folder)
            finally:
                self._saved = saved

        with self._each_optimizer(saves_whole), comm.together(self.grid.world):
            if self.grid.rank:
                run_hooks(self._models, list(weights.values()), None)
            else:
                self._saved, self._save_model_state_pre_hook = weights, OrderedDict({0: run_hooks})
                try:
                    super().save_state(*arguments, **options)
                finally:
                    self._saved, self._save_model_state_pre_hook = None, hooks
                    if not came:
                        run_hooks([], [], None)
        if self.grid.rank:
            self.project_configuration.iteration += 1
        return Path(came[0])

    def load_state(self, *arguments: Any, **options: Any) -> None:
        own = self.state.process_index

        def load(models, folder):
            """After the script's own hooks, which may have loaded some models and left others."""
            _load_models(models, folder, options.get("strict", True))
            self.state.process_index = 0  # whose generators all ranks go on with

        last = self.register_load_state_pre_hook(load)
        try:
            with self._each_optimizer(loads_whole):
                super().load_state(*arguments, **options)
        finally:
            last.remove()
            self.state.process_index = own

    @contextlib.contextmanager
    def _each_optimizer(self, whole):
        with contextlib.ExitStack() as stack:
            for prepared in self._optimizers:
                weights = {weight for group in prepared.param_groups for weight in group["params"]}
                models = [model for model in self._models if not weights.isdisjoint(model.parameters())]
                if any(hasattr(weight, "shard") for weight in weights):
                    stack.enter_context(whole(torch.nn.ModuleList(models), prepared.optimizer, self.grid))
            yield


def _only(here: bool, function: Callable | None) -> Callable:
    """A decorator of functions that do nothing on other ranks."""
    if function is None:
        return functools.partial(_only, here)
    return function if here else functools.wraps(function)(lambda *_, **__: None)


def _load_models(models: list[torch.nn.Module], folder: str, strict: bool) -> None:
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
        model.load_state_dict(state, strict)
    models.clear()
