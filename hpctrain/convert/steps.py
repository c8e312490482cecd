"""Between backward and the optimizer, in a training loop of one's own."""

from __future__ import annotations

import torch

from hpctrain.convert.arriving_gradients import check_summed
from hpctrain.convert.averaging import sum_over_replicas
from hpctrain.data_parallel.clipping import check_max_norm, clip, local_squares, replica_totals
from hpctrain.given import check_types
from hpctrain.grid import Grid
from hpctrain.parameter import Strategy
from hpctrain.rank_gradient import as_tensors
from hpctrain.shard import check_shards


def sync_gradients(model: torch.nn.Module, grid: Grid | None = None) -> None:
    """Sum the gradients over the replicas, and those of experts over the ranks that have the same.

    Without a data axis and experts in copies, nothing is left to do for a parallelized model.

    The sum is not divided: divide the loss by the batch of all replicas before backward. For models of `ht.layers`,
    whose gradients are partial sums over tensor axes as well, those are completed too. A parameter without a gradient
    on any rank stays without.

    Args:
        grid: of a model that `parallelize` did not make.

    Raises:
        ValueError: on every rank, when the gradients are summed already, or a backward has added to sums; for a model
            made with `zero`, whose gradients are averaged without, and one that a strategy has.
    """
    grid = grid_of(model, grid)
    if replicas_of(model) is not None:
        raise ValueError(
            "ht.sync_gradients sums the gradients of replicas, and ht.parallelize(zero=...) averages them by itself, "
            "as torch's DistributedDataParallel does; leave the call out, and let the loss be the mean over the "
            "replica's own batch"
        )
    if (strategy := _strategy_of(model)) is not None:
        raise ValueError(
            f"ht.sync_gradients would sum once more what {type(strategy).__name__} sums: call "
            "strategy.finish_grad_sync() instead"
        )
    if not sum_over_replicas(model, grid):
        raise ValueError(
            "ht.sync_gradients was called twice: the gradients are the sums over the replicas already, and a second "
            "sum would multiply them by the number of replicas; call it once, after the last backward of a step"
        )


def clip_grad_norm_(model: torch.nn.Module, max_norm: float, grid: Grid | None = None) -> torch.Tensor:
    """Scale the gradients so that the norm of the dense gradient is at most `max_norm`; returns that norm, float64.

    As torch.nn.utils.clip_grad_norm_ on one rank. Call `sync_gradients` first, where the model was made without `zero`.

    Args:
        grid: of a model that `parallelize` did not make.

    Raises:
        ValueError: when the gradients of a model's replicas are not summed, or a strategy spreads the sums over them;
            for a `max_norm` below 0.
    """
    grid = grid_of(model, grid)
    check_max_norm(max_norm)
    parameters = list(model.parameters())
    if (replicas := replicas_of(model)) is not None:
        replicas.complete(step=True)
        if replicas.divided:
            return replicas.clip(max_norm)
    else:
        check_strategy(model, "ht.clip_grad_norm_")
    check_summed(parameters, "ht.clip_grad_norm_")
    with as_tensors():
        nothing = torch.zeros((), dtype=torch.float64)
        norm = replica_totals(nothing, local_squares(parameters, grid.coords), grid)[1].sqrt()
        clip(parameters, norm.item(), max_norm)
    return norm


def check_strategy(model: torch.nn.Module, name: str) -> None:
    """Raise ValueError where a strategy has the sums of the gradients elsewhere than in `.grad`."""
    strategy = _strategy_of(model)
    if strategy is not None and not strategy.uses_grad:
        raise ValueError(
            f"{name} found no whole gradients, as {type(strategy).__name__} spreads their sums over the ranks; "
            "strategy.loss_and_grad_norm(loss) gives the norm of all, and strategy.step(norm, max_norm) clips by it"
        )


def _strategy_of(model: torch.nn.Module) -> Strategy | None:
    """One that has some of the parameters."""
    return next((each for p in model.parameters() if (each := vars(p).get("strategy")) is not None), None)


def replicas_of(model: torch.nn.Module):
    """Who averages the gradients of its replicas: of `parallelize` with `zero`, on a grid with replicas; or None."""
    return next((each for p in model.parameters() if (each := vars(p).get("replicas")) is not None), None)


def divided_replicas(model: torch.nn.Module):
    """`replicas_of`, where they share gradients and states of the optimizer (zero=1 to 3); otherwise None."""
    replicas = replicas_of(model)
    return replicas if replicas is not None and replicas.divided else None


def grid_of(model: torch.nn.Module, grid: Grid | None) -> Grid:
    """The grid of a model; `grid` itself where it is given."""
    grid = getattr(model, "hpctrain_grid", None) if grid is None else grid
    check_types(model=(model, torch.nn.Module))
    if grid is None:
        raise ValueError("the model was not made by parallelize: pass its grid, as in ht.sync_gradients(model, grid)")
    check_types(grid=(grid, Grid))
    if grid.pipeline.size > 1:
        raise ValueError(
            f"got pipeline={grid.pipeline.size}: models cut into stages are trained by ht.Trainer or `hpctrain train`"
        )
    check_shards(model)
    return grid
