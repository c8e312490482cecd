"""The state of an optimizer of a parallelized model, whole: what torch's optimizer of the plain model would save."""

from __future__ import annotations

import functools
from typing import Any

import torch

from hpctrain import comm
from hpctrain.convert.saved_state import mark_saved
from hpctrain.convert.steps import divided_replicas, grid_of
from hpctrain.given import check_types
from hpctrain.grid import Grid
from hpctrain.layers.whole_parameters import counted, whole_tensors
from hpctrain.parameter import shard_of
from hpctrain.rank_gradient import as_tensors
from hpctrain.shard_entries import Entry


def gather_optimizer_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, grid: Grid | None = None
) -> dict[str, Any]:
    """`optimizer.state_dict()` of the plain model, in host memory, on rank 0 of the grid; empty elsewhere. Collective.

    An optimizer of the plain model takes it by `load_state_dict`, that of the model on any grid, with any `zero`, by
    `ht.load_optimizer_state`. Tensors travel one by one.

    Args:
        optimizer: of parameters of the model, in a loop of one's own.
        grid: of a model that `parallelize` did not make.

    Raises:
        ValueError: on every rank, when the optimizer has weights that are not the model's, or keeps of a divided weight
            a tensor of another shape, which cannot be put together.
    """
    grid = grid_of(model, grid)
    check_types(optimizer=(optimizer, torch.optim.Optimizer))
    with as_tensors():
        with comm.together(grid.world):
            places = _places(model, optimizer)
            state, entries = _of_this_rank(model, optimizer, places, grid)
            groups = [
                {**group, "params": [places[parameter] for parameter in group["params"]]}
                for group in optimizer.param_groups
            ]
        everyone = grid.comm.gather(state)
        whole: dict[int, dict[str, Any]] = {}
        for there in everyone or ():
            for place, values in there.items():
                whole[place] = values | whole.get(place, {})
        numbers = {name: places[p] for name, p in model.named_parameters() if p in places}
        for path, tensor in whole_tensors(entries, grid):
            if grid.rank == 0:
                key, _, name = path.partition("/")
                shape = getattr(model.get_parameter(name), "whole_shape", tensor.shape)
                whole[numbers[name]][key] = tensor.view(shape)
    return {"state": dict(sorted(whole.items())), "param_groups": groups} if grid.rank == 0 else {}


def _of_this_rank(model, optimizer, places, grid):
    """What this rank counts of the state: its numbers, with None in the place of tensors, and parts of these."""
    replicas = divided_replicas(model)
    spread = replicas.pieces_of(optimizer) if replicas else {}
    names = {p: name for name, p in model.named_parameters()}
    state: dict[int, dict[str, Any]] = {}
    entries: list[Entry] = []
    for parameter, place in places.items():
        piece, shard = spread.get(parameter), shard_of(parameter)
        local = piece.local if piece else parameter
        is_mine = piece.stop > piece.start and shard.owned(grid.coords) if piece else counted(parameter, grid)
        if not is_mine or local not in optimizer.state:
            continue
        values = state[place] = {}
        for key, value in optimizer.state[local].items():
            path, is_part = f"{key}/{names[parameter]}", _is_part(key, value, parameter, local)
            values[key] = None if is_part else _on_host(value)
            if is_part:
                entries += piece.entries(path, value) if piece else [Entry(path, shard, value)]
    return state, entries


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
    grid = grid_of(model, grid)
    check_types(optimizer=(optimizer, torch.optim.Optimizer), state=(state, dict))
    parts = parts_of_state(model, optimizer, state, grid)
    replicas = divided_replicas(model)
    load = optimizer.load_state_dict if replicas is None else functools.partial(replicas.load_state, optimizer)
    load(parts)
    mark_saved(optimizer)


def parts_of_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], grid: Grid
) -> dict[str, Any]:
    """This rank's part of a whole state dict; where replicas spread it, flat. Collective; raises as
    `load_optimizer_state`."""
    replicas, parts = divided_replicas(model), {}
    with comm.together(grid.world), as_tensors():
        if "param_groups" not in state:
            raise ValueError("the state of an optimizer must be whole on every rank: load its file on each of them")
        parameters = {place: parameter for parameter, place in _places(model, optimizer).items()}
        spread = replicas.pieces_of(optimizer) if replicas else {}
        for place, values in state["state"].items():
            if place not in parameters:
                raise ValueError("the state is of an optimizer with more weights than this one")
            parameter, piece = parameters[place], spread.get(parameters[place])
            parts[place] = {key: _take(key, value, parameter, piece) for key, value in values.items()}
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


def _is_part(key, value, parameter, local) -> bool:
    """Whether it has one element for each of this rank's weights, of which the optimizer knows as `local`."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return False
    if value.shape == local.shape:
        return True
    shard = shard_of(parameter)
    if shard.shape == shard.global_shape and local is parameter:
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


def _take(key, value, parameter, piece):
    """This rank's part of a parameter's state; a `piece` of that, flat, where replicas spread it."""
    if not isinstance(value, torch.Tensor):
        return value
    shard = shard_of(parameter)
    if value.dim() == 0 and (shard.global_shape or key == "step"):  # by which torch too knows a number
        return value.clone()  # optimizers keep what they are given, and change it in place
    if tuple(value.shape) == tuple(getattr(parameter, "whole_shape", shard.global_shape)):
        part = value.reshape(shard.global_shape)[shard.slices]
        if piece is not None:
            return part.reshape(-1)[piece.start : piece.stop].clone()
        return part.clone(memory_format=torch.contiguous_format).view(parameter.shape)
    if shard.shape == shard.global_shape and piece is None:
        return value.clone()
    raise _mixed(key, value, parameter)
