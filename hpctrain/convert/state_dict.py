"""The whole weights of a parallelized model, under their original names."""

from __future__ import annotations

import torch

from hpctrain import comm
from hpctrain.convert.steps import grid_of
from hpctrain.grid import Grid
from hpctrain.layers.whole_parameters import whole_parameters


def gather_state_dict(model: torch.nn.Module, grid: Grid | None = None) -> dict[str, torch.Tensor]:
    """The state dict of the original module, in host memory, on rank 0 of the grid; empty elsewhere. Collective.

    Parameters travel one by one, so that no other rank ever holds more than its own parts. Shared weights come under
    all of their names, as one tensor.

    Args:
        grid: of a model that `parallelize` did not make.
    """
    stages = getattr(model, "hpctrain_pipeline", None)
    grid = stages.grid if stages else grid_of(model, grid)
    tensors = dict(model.state_dict(keep_vars=True))
    first: dict[int, str] = {}
    names = stages.names if stages else {name: first.setdefault(id(x), name) for name, x in tensors.items()}
    shapes = {names[name]: p.whole_shape for name, p in model.named_parameters() if hasattr(p, "whole_shape")}
    if stages:
        for other in grid.pipeline.comm.allgather(shapes):
            shapes |= other
    gathered = {}
    for name, whole in whole_parameters(model, grid):
        if grid.rank == 0:
            gathered[names[name]] = whole.view(shapes.get(names[name], whole.shape))
    buffers = {name: x.detach().cpu() for name, x in tensors.items() if not isinstance(x, torch.nn.Parameter)}
    gathered |= _of_all_stages(buffers, grid) if stages else buffers
    if grid.rank:
        return {}
    return {name: gathered[names[name]] for name in (stages.saved if stages else tensors)}


def _of_all_stages(buffers: dict[str, torch.Tensor], grid: Grid) -> dict[str, torch.Tensor]:
    """On the first rank, those of all stages."""
    if grid.data.rank or grid.tensor.rank:
        return {}
    described = grid.pipeline.comm.allgather({name: (x.shape, x.dtype) for name, x in buffers.items()})
    found = dict(buffers)
    for rank, theirs in enumerate(described):
        for name in (name for name in theirs if name not in described[0]):  # in one order
            owner = next(r for r, each in enumerate(described) if name in each)
            if owner != rank:
                continue
            if grid.pipeline.rank == rank:
                comm.send(buffers[name].contiguous(), grid.pipeline, 0)
            elif grid.pipeline.rank == 0:
                shape, dtype = theirs[name]
                found[name] = comm.recv(torch.empty(shape, dtype=dtype), grid.pipeline, rank)
    return found
