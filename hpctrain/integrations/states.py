"""What the libraries have in common: grids of replicas and tensor axes, and optimizers whose states are whole."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from hpctrain.convert import gather_optimizer_state, load_optimizer_state
from hpctrain.grid import Grid


def check_grid(grid: Grid, what: str) -> None:
    """Raise ValueError for a grid with stages, or whose ranks share sequences, of which the library knows nothing."""
    if grid.pipeline.size > 1:
        raise ValueError(
            f"{what} calls the whole model, got pipeline={grid.pipeline.size}; use replicas and tensor axes alone, as "
            "ht.Grid(data=2, tensor=4), or ht.Trainer"
        )
    grid.check_whole_sequences(what)


def check_averaged(groups: list[dict], grid: Grid) -> None:
    """Raise ValueError where replicas would not step alike, or could not save or load, by optimizers of these groups
    of weights."""
    if grid.replica.size == 1:
        return
    weights = [weight for group in groups for weight in group["params"] if weight.requires_grad]
    replicas = dict.fromkeys(vars(weight).get("replicas") for weight in weights)
    if None in replicas:
        raise ValueError(
            f"an optimizer has weights whose gradients nobody averages over the {grid.replica.size} replicas; make it "
            "of the parameters of ht.parallelize(model, grid, zero=0), or zero=1 or 2"
        )
    spread = [each for each in replicas if each.divided]
    if any(each.level == 3 for each in spread):
        raise ValueError("zero=3 cannot load weights once they are spread over the replicas; use zero=2")
    if spread and len(replicas) > 1:
        raise ValueError(
            f"an optimizer has weights of {len(replicas)} models whose replicas share its state by zero=1 or 2; use "
            "zero=0, or with accelerate one optimizer for each"
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
    vars(optimizer)["state_dict"] = lambda: state
    try:
        yield
    finally:
        del vars(optimizer)["state_dict"]


@contextlib.contextmanager
def loads_whole(model: torch.nn.Module, optimizer: torch.optim.Optimizer, grid: Grid) -> Iterator[None]:
    """Within the block `optimizer.load_state_dict` takes a whole one, on every rank, once."""

    def load(state):
        del vars(optimizer)["load_state_dict"]
        load_optimizer_state(model, optimizer, state, grid)

    vars(optimizer)["load_state_dict"] = load
    try:
        yield
    finally:
        vars(optimizer).pop("load_state_dict", None)
