"""What the libraries have in common: one process each, on tensor axes alone, and optimizers whose states are whole."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from hpctrain.convert.optimizer_state import gather_optimizer_state, parts_of_state
from hpctrain.grid import Grid


def check_grid(grid: Grid, what: str) -> None:
    """Raise ValueError for a grid with replicas or stages, of which the library knows nothing."""
    if grid.size != grid.tensor.size:
        raise ValueError(
            f"{what} gives every rank the same batches, got data={grid.data.size}, pipeline={grid.pipeline.size}; use "
            "a grid of tensor axes alone, as ht.Grid(tensor=4), or a loop of your own with zero=0 of ht.parallelize"
        )


def check_one_writer(save_on_each_node: bool) -> None:
    """Raise ValueError where a rank of every node is to save."""
    if save_on_each_node:
        raise ValueError("save_on_each_node=True: rank 0 alone has the whole weights; save where all nodes see it")


def local_rank(grid: Grid) -> int:
    """This rank's number on its node."""
    nodes = grid.world.nodes
    return nodes[: grid.rank].count(nodes[grid.rank])


@contextlib.contextmanager
def saves_whole(model: torch.nn.Module, optimizer: torch.optim.Optimizer, grid: Grid) -> Iterator[None]:
    """Within the block `optimizer.state_dict()` is the whole one, on rank 0. Collective at its start."""
    state = gather_optimizer_state(model, optimizer, grid)
    hook = optimizer.register_state_dict_post_hook(lambda optimizer, own: state)
    try:
        yield
    finally:
        hook.remove()


@contextlib.contextmanager
def loads_whole(model: torch.nn.Module, optimizer: torch.optim.Optimizer, grid: Grid) -> Iterator[None]:
    """Within the block `optimizer.load_state_dict` takes a whole one, on every rank."""
    hook = optimizer.register_load_state_dict_pre_hook(
        lambda optimizer, state: parts_of_state(model, optimizer, state, grid)
    )
    try:
        yield
    finally:
        hook.remove()
