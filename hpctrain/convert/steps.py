"""Between backward and the optimizer, in a training loop of one's own."""

from __future__ import annotations

import torch

from hpctrain import comm
from hpctrain.convert.gradients import as_tensors, check_summed, is_summed, mark_summed
from hpctrain.data_parallel.buckets import sum_gradients, summed_over
from hpctrain.data_parallel.clipping import clip, local_squares, replica_totals
from hpctrain.grid import Grid
from hpctrain.shard import check_shards


def sync_gradients(model: torch.nn.Module, grid: Grid | None = None) -> None:
    """Sum the gradients over the replicas; without a data axis, nothing is left to do for a parallelized model.

    The sum is not divided: divide the loss by the batch of all replicas before backward. For models of `ht.layers`,
    whose gradients are partial sums over tensor axes as well, those are completed too. A parameter without a gradient
    on any rank stays without.

    Args:
        grid: of a model that `parallelize` did not make.

    Raises:
        ValueError: on every rank, when the gradients are summed already, and no backward has added to them since.
    """
    grid = grid_of(model, grid)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with as_tensors():
        used = _complete(parameters, grid)
        sum_gradients(used, grid)
        mark_summed(used)


def clip_grad_norm_(model: torch.nn.Module, max_norm: float, grid: Grid | None = None) -> torch.Tensor:
    """Scale the gradients so that the norm of the dense gradient is at most `max_norm`; returns that norm, float64.

    As torch.nn.utils.clip_grad_norm_ on one rank. Call `sync_gradients` first.

    Args:
        grid: of a model that `parallelize` did not make.

    Raises:
        ValueError: when the gradients of a parallelized model's replicas are not summed.
    """
    grid = grid_of(model, grid)
    parameters = list(model.parameters())
    check_summed(parameters, "ht.clip_grad_norm_")
    with as_tensors():
        nothing = torch.zeros((), dtype=torch.float64)
        norm = replica_totals(nothing, local_squares(parameters, grid.coords), grid)[1].sqrt()
        clip(parameters, norm.item(), max_norm)
    return norm


def grid_of(model: torch.nn.Module, grid: Grid):
    """The grid of a model; `grid` itself where it is given."""
    grid = grid or getattr(model, "hpctrain_grid", None)
    if grid is None:
        raise ValueError("the model was not made by parallelize: pass its grid, as in ht.sync_gradients(model, grid)")
    if grid.pipeline.size > 1:
        raise ValueError(f"got pipeline={grid.pipeline.size}: models cut into stages are trained by `hpctrain train`")
    check_shards(model)
    return grid


def _complete(parameters, grid) -> list[torch.nn.Parameter]:
    """The parameters that have a gradient on any rank that shares them; where others have none, it is zero there.

    Raises:
        ValueError: on every rank, when all of these gradients are sums over the replicas already.
    """
    by_axis: dict = {grid.data: [parameter for parameter in parameters if parameter.shard.alike == "data"]}
    for parameter in parameters:
        if parameter.shard.alike == "copies":
            by_axis.setdefault(grid.copies, []).append(parameter)
        if (plane := summed_over(parameter, grid)) is not None:
            by_axis.setdefault(plane, []).append(parameter)
    there = {parameter: parameter.grad is not None for parameter in parameters}
    unsummed = any(parameter.grad is not None and not is_summed(parameter.grad) for parameter in parameters)
    for axis in sorted(by_axis, key=lambda axis: axis is grid.data):  # over the data axis last, of what all have told
        flags = torch.tensor([*(there[parameter] for parameter in by_axis[axis]), unsummed], dtype=torch.float32)
        *found, unsummed = comm.all_reduce(flags, axis, "max").tolist()
        there.update(zip(by_axis[axis], map(bool, found)))
    used = [parameter for parameter in parameters if there[parameter]]
    if used and not unsummed and any(axis.size > 1 for axis in by_axis):
        raise ValueError(
            "ht.sync_gradients was called twice: the gradients are the sums over the replicas already, and a second "
            "sum would multiply them by the number of replicas; call it once, after the last backward of a step"
        )
    for parameter in used:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return used
