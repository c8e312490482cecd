"""The whole weights of a parallelized model, under their original names."""

from __future__ import annotations

import torch

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
    grid = grid_of(model, grid)
    tensors = dict(model.state_dict(keep_vars=True))
    aliases: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        aliases.setdefault(id(tensor), []).append(name)
    gathered = {}
    for name, whole in whole_parameters(model, grid):
        if grid.rank == 0:
            parameter = tensors[name]
            whole = whole.view(getattr(parameter, "whole_shape", whole.shape))
            gathered.update(dict.fromkeys(aliases[id(parameter)], whole))
    if grid.rank:
        return {}
    return {name: gathered[name] if name in gathered else tensor.detach().cpu() for name, tensor in tensors.items()}
