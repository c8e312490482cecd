"""Hugging Face's accelerate on a grid of replicas and tensor axes.

    accelerator = GridAccelerator(grid, gradient_accumulation_steps=2)
    model = ht.parallelize(model, grid, zero=0)
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
from accelerate.checkpointing import save_accelerator_state
from accelerate.utils import MODEL_NAME, SAFE_MODEL_NAME
from accelerate.utils.operations import recursively_apply
from safetensors.torch import load_file

from hpctrain import comm
from hpctrain.convert import gather_state_dict
from hpctrain.grid import Grid
from hpctrain.integrations import replicas
from hpctrain.integrations.states import (
    check_averaged,
    check_grid,
    check_one_writer,
    loads_whole,
    local_rank,
    saves_whole,
)


def join_grid(grid: Grid) -> None:
    """Tell accelerate that there are as many processes as replicas, and that the first rank is the main one.

    Raises:
        ValueError: on every rank, where the grid has stages or shares sequences, or accelerate started
            torch.distributed.
    """
    check_grid(grid, "accelerate")
    state = accelerate.PartialState()
    with comm.together(grid.world):
        if state.distributed_type != accelerate.DistributedType.NO:
            raise ValueError(
                f"accelerate has started torch.distributed for {state.num_processes} processes, which would take the "
                "ranks of a tensor axis for replicas; leave out cpu=True, use_cpu=True, ACCELERATE_USE_CPU and "
                "LOCAL_RANK, so that each rank is one process to it; CUDA_VISIBLE_DEVICES= keeps to the processor"
            )
    state.num_processes = grid.replica.size
    state.process_index, state.local_process_index = grid.rank, local_rank(grid)


@contextlib.contextmanager
def as_replica(grid: Grid) -> Iterator[None]:
    """Within the block accelerate takes the ranks of a replica for one process, as it shares out data."""
    state = accelerate.PartialState()
    own, state.process_index = state.process_index, grid.replica.rank
    try:
        yield
    finally:
        state.process_index = own


def on_grid(accelerator: accelerate.Accelerator, grid: Grid) -> GridAccelerator:
    """Make an Accelerator a GridAccelerator; it was made after `join_grid`."""
    accelerator.__class__ = GridAccelerator
    accelerator._join(grid)
    return accelerator


class GridAccelerator(accelerate.Accelerator):
    """An Accelerator for models that `ht.parallelize` divided over a grid of replicas and tensor axes.

    `backward`, `clip_grad_norm_`, accumulation and mixed precision are its own. A replica is what is a process
    elsewhere: `process_index` and `num_processes`, batches, `gather_for_metrics` and steps of schedulers are those of
    replicas. The main process, trackers and the decorators are those of ranks.

    `save_state` and `save_model` write whole weights and optimizer states, on the first rank, `get_state_dict` returns
    whole weights there, and `load_state` takes them on any grid. All of these, and `check_trigger`, are collective:
    every rank calls them. Hooks of saving and loading run on every rank; `weights`, which the former are given, are
    empty but on the first. Every replica reads the batches of iterable datasets itself.

    Args:
        grid: of replicas and tensor axes.
        options: of accelerate.Accelerator.

    Raises:
        ValueError: on every rank, for `save_on_each_node`, and as `join_grid`; with replicas for `rng_types` of other
            generators than the samplers', `even_batches=False` and `join_uneven_inputs`, and by `prepare` for an
            optimizer of weights that nobody averages, that zero=3 spreads, or of several models with zero=1 or 2.
    """

    log_with: list
    flag_tensor: torch.Tensor | None
    _save_model_state_pre_hook: OrderedDict[int, Callable]

    def __init__(self, grid: Grid, **options: Any):
        join_grid(grid)
        super().__init__(**options)
        self._join(grid)

    def _join(self, grid: Grid) -> None:
        with comm.together(grid.world):
            check_one_writer(self.project_configuration.save_on_each_node)
            if grid.replica.size > 1 and not self.even_batches:
                raise ValueError("replicas step together, each with as many batches: leave out even_batches=False")
            if grid.replica.size > 1 and self.rng_types != ["generator"]:
                raise ValueError(
                    f"replicas share the generators of samplers alone, got rng_types={self.rng_types}; leave it out"
                )
        self.grid = grid
        self._saved: dict[int, dict] | None = None  # while the first rank saves: the weights of each model
        self.dataloader_config.dispatch_batches = False  # else the first rank alone would read an iterable dataset
        if grid.rank:
            self.log_with = []

    @property
    def process_index(self) -> int:
        return self.grid.replica.rank

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
        return _only(self.grid.rank == process_index, function)

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

    @contextlib.contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        given = inputs.values() if isinstance(inputs, dict) else [inputs]
        if apply_padding and self.num_processes > 1 and any(isinstance(each, torch.Tensor) for each in given):
            raise ValueError(
                "apply_padding=True pads lists, not tensors; give lists, or call pad_across_processes for the parts"
            )
        with contextlib.ExitStack() as within:
            with as_replica(self.grid):
                part = within.enter_context(super().split_between_processes(inputs, apply_padding))
            yield part

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        with comm.together(self.grid.world):
            check_averaged(optimizer.param_groups, self.grid)
        return super().prepare_optimizer(optimizer, device_placement)

    def prepare_data_loader(self, *arguments: Any, **options: Any) -> torch.utils.data.DataLoader:
        loader = super().prepare_data_loader(*arguments, **options)
        if (generator := getattr(loader, "synchronized_generator", None)) is not None:
            generator.set_state(comm.all_gather_object(generator.get_state(), self.grid.world)[0])
        return loader

    def join_uneven_inputs(self, joinables: list, even_batches: bool | None = None) -> Any:
        if self.grid.replica.size > 1:
            raise ValueError("replicas step together, each with as many batches: leave out join_uneven_inputs")
        return super().join_uneven_inputs(joinables, even_batches)

    def gather(self, tensor: Any) -> Any:
        if self.num_processes == 1:
            return tensor
        return _each_tensor(lambda x: replicas.gather(x, self.grid.replica), tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        try:
            _each_tensor(lambda x: x, input_data)
        except TypeError:
            use_gather_object = True
        if use_gather_object and self.num_processes > 1:
            input_data = [x for each in comm.all_gather_object(input_data, self.grid.replica) for x in each]
        return super().gather_for_metrics(input_data, use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        return _each_tensor(lambda x: replicas.reduce(x, self.grid.replica, reduction), tensor)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        return _each_tensor(lambda x: replicas.pad(x, self.grid.replica, dim, pad_index, pad_first), tensor)

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
                if came[0] and self.grid.tensor.rank == 0:
                    save_accelerator_state(came[0], [], [], [], [], self.process_index, self.step)  # its generators
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
            self.state.process_index = self.process_index  # whose generators all ranks of the replica go on with

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


def _each_tensor(function: Callable, data: Any) -> Any:
    """Of nested tuples, lists and mappings; raises TypeError where there is anything else in them."""
    return recursively_apply(function, data, error_on_other_type=True)


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
