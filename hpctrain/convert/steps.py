"""Between backward and the optimizer, in a training loop of one's own."""

from __future__ import annotations

import torch

from hpctrain import comm
from hpctrain.convert.gradients import as_tensors, check_summed, mark_summed
from hpctrain.replicas.clipping import clip, local_square
from hpctrain.replicas.data_parallel import BUCKET_BYTES, summed_over
from hpctrain.shard import check_shards


def sync(model: torch.nn.Module, grid=None) -> None:
    """Sum the gradients over the replicas; without a data axis, nothing is left to do for a parallelized model.

    The sum is not divided: divide the loss by the batch of all replicas before backward. For models of `ht.layers`,
    whose gradients are partial sums over tensor axes as well, those are completed too. A parameter without a gradient
    on any rank stays without.

    Args:
        grid: of a model that `parallelize` did not make.
    """
    grid = grid_of(model, grid)
    groups: dict = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups.setdefault(summed_over(parameter, grid), []).append(parameter)
    with as_tensors():
        for plane, parameters in groups.items():
            if plane is not None:
                _sum(parameters, plane)
        _sum([parameter for parameters in groups.values() for parameter in parameters], grid.data)
        mark_summed(model.parameters())


def clip_(model: torch.nn.Module, max_norm: float, grid=None) -> torch.Tensor:
    """Scale the gradients so that the norm of the dense gradient is at most `max_norm`; returns that norm, float64.

    As torch.nn.utils.clip_grad_norm_ on one rank. Call `sync` first.

    Args:
        grid: of a model that `parallelize` did not make.

    Raises:
        ValueError: when the gradients of a parallelized model's replicas are not summed.
    """
    grid = grid_of(model, grid)
    parameters = list(model.parameters())
    check_summed(parameters, "ht.clip_")
    with as_tensors():
        square = comm.all_reduce(local_square(parameters, grid.coords), grid.tensor)
        norm = square.sqrt()
        clip(parameters, norm.item(), max_norm)
    return norm


def grid_of(model, grid):
    """The grid of a model; `grid` itself where it is given."""
    grid = grid or getattr(model, "hpctrain_grid", None)
    if grid is None:
        raise ValueError("the model was not made by parallelize: pass its grid, as in ht.sync(model, grid)")
    if grid.pipeline.size > 1:
        raise ValueError(f"got pipeline={grid.pipeline.size}: models cut into stages are trained by `hpctrain train`")
    check_shards(model)
    return grid


def _sum(parameters, axis) -> None:
    """Replace the parameters' gradients by their sums over the axis, a bucket at a time."""
    if axis.size == 1 or not parameters:
        return
    used = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.float32)
    comm.all_reduce(used, axis, "max")
    gradients: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter, anywhere in zip(parameters, used.tolist()):
        if anywhere:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    for same in gradients.values():
        for bucket in _buckets(same):
            flat = comm.all_reduce(torch.cat([gradient.reshape(-1) for gradient in bucket]), axis)
            for gradient, total in zip(bucket, flat.split([gradient.numel() for gradient in bucket])):
                gradient.copy_(total.view_as(gradient))


def _buckets(gradients):
    bucket = []
    for gradient in gradients:
        bucket.append(gradient)
        if sum(held.nbytes for held in bucket) >= BUCKET_BYTES:
            yield bucket
            bucket = []
    if bucket:
        yield bucket
