"""The state of an optimizer of a parallelized model, whole: what torch's optimizer of the plain model would save."""

from __future__ import annotations

from typing import Any

import torch

from hpctrain import comm
from hpctrain.convert.gradients import as_tensors
from hpctrain.convert.steps import grid_of, undivided_replicas
from hpctrain.grid import Grid
from hpctrain.layers.whole_parameters import whole_parameters
from hpctrain.parameter import shard_of


def gather_optimizer_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, grid: Grid | None = None
) -> dict[str, Any]:
    """`optimizer.state_dict()` of the plain model, in host memory, on rank 0 of the grid; empty elsewhere. Collective.

    An optimizer of the plain model takes it by `load_state_dict`, that of the model on any grid by
    `ht.load_optimizer_state`. Tensors travel one by one.

    Args:
        optimizer: of parameters of the model, in a loop of one's own.
        grid: of a model that `parallelize` did not make.

    Raises:
        ValueError: on every rank, when the optimizer has weights that are not the model's, or keeps of a divided weight
            a tensor of another shape, which cannot be put together.
    """
    grid = grid_of(model, grid)
    undivided_replicas(model, "ht.gather_optimizer_state")
    with as_tensors():
        with comm.together(grid.comm):
            places = _places(model, optimizer)
            parts = [
                key for p in places for key, value in optimizer.state.get(p, {}).items() if _is_part(key, value, p)
            ]
        state: dict[int, dict[str, Any]] = {}
        if grid.rank == 0:
            for parameter, place in places.items():
                if parameter in optimizer.state:
                    state[place] = {key: _on_host(value) for key, value in optimizer.state[parameter].items()}
        numbers = {name: places[p] for name, p in model.named_parameters() if p in places}
        for key in dict.fromkeys(key for keys in grid.comm.allgather(list(dict.fromkeys(parts))) for key in keys):

            def part(parameter, key=key):
                value = optimizer.state.get(parameter, {}).get(key)
                return value if _is_part(key, value, parameter) else None

            for name, whole in whole_parameters(model, grid, part):
                if grid.rank == 0:
                    shape = getattr(model.get_parameter(name), "whole_shape", whole.shape)
                    state[numbers[name]][key] = whole.view(shape)
    return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]} if grid.rank == 0 else {}


def load_optimizer_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], grid: Grid | None = None
) -> None:
    """`optimizer.load_state_dict(state)` of a whole state, of which every rank keeps its parts. Collective.

    Args:
        state: of `ht.gather_optimizer_state` or of the plain model's optimizer; the same on every rank, as
            `model.load_state_dict` takes it, such as torch.load(path, mmap=True).
        grid: of a model that `parallelize` did not make.

    Raises:
        ValueError: on every rank, when the state is of other weights.
    """
    undivided_replicas(model, "ht.load_optimizer_state")
    parts = parts_of_state(model, optimizer, state, grid_of(model, grid))
    optimizer.load_state_dict(parts)


def parts_of_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], grid: Grid
) -> dict[str, Any]:
    """This rank's part of a whole state dict. Collective; raises as `load_optimizer_state`."""
    with comm.together(grid.comm), as_tensors():
        if "param_groups" not in state:
            raise ValueError("the state of an optimizer must be whole on every rank: load its file on each of them")
        parameters = {place: parameter for parameter, place in _places(model, optimizer).items()}
        parts = {
            place: {key: _take(key, value, parameters.get(place)) for key, value in entries.items()}
            for place, entries in state["state"].items()
        }
    return {"state": parts, "param_groups": state["param_groups"]}


def _places(model, optimizer) -> dict[torch.nn.Parameter, int]:
    """The number of each parameter in the optimizer's state dict."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    own = set(model.parameters())
    for place, parameter in enumerate(parameters):
        if parameter not in own:
            raise ValueError(
                f"weight {place} of the optimizer, of shape {tuple(parameter.shape)}, is none of the model's; make the "
                "optimizer of model.parameters() after parallelize"
            )
    return {parameter: place for place, parameter in enumerate(parameters)}


def _is_part(key, value, parameter) -> bool:
    """Whether it has one element for each of this rank's weights."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return False
    if value.shape == parameter.shape:
        return True
    shard = shard_of(parameter)
    if shard.shape == shard.global_shape:
        return False
    raise _mixed(key, value, parameter)


def _mixed(key, value, parameter) -> ValueError:
    shape = getattr(parameter, "whole_shape", shard_of(parameter).global_shape)
    return ValueError(
        f"the optimizer's {key!r} of shape {tuple(value.shape)} is not of the shape of its weight, {tuple(shape)}, "
        "which is divided over ranks; use an optimizer that treats every element by itself, such as AdamW"
    )


def _on_host(value):
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def _take(key, value, parameter):
    if parameter is None:
        raise ValueError("the state is of an optimizer with more weights than this one")
    if not isinstance(value, torch.Tensor):
        return value
    shard = shard_of(parameter)
    if value.dim() == 0:
        return value.clone()  # optimizers keep what they are given, and change it in place
    if tuple(value.shape) == tuple(getattr(parameter, "whole_shape", shard.global_shape)):
        part = value.reshape(shard.global_shape)[shard.slices]
        return part.clone(memory_format=torch.contiguous_format).view(parameter.shape)
    if shard.shape == shard.global_shape:
        return value.clone()
    raise _mixed(key, value, parameter)
