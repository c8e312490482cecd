"""The whole weights and gradients of a parallelized model, under their original names."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from hpctrain import comm
from hpctrain.convert.arriving_gradients import check_summed
from hpctrain.convert.steps import check_strategy, divided_replicas, grid_of, replicas_of
from hpctrain.grid import Grid
from hpctrain.layers.whole_parameters import counted, whole_parameters, whole_state, whole_tensors
from hpctrain.parameter import shard_of
from hpctrain.rank_gradient import as_tensors
from hpctrain.shard_entries import Entry


def gather_state_dict(model: torch.nn.Module, grid: Grid | None = None) -> dict[str, torch.Tensor]:
    """The state dict of the original module, in host memory, on rank 0 of the grid; empty elsewhere. Collective.

    It is a copy, which training goes on without changing; but what `get_extra_state()` of a module gives that is no
    tensor is passed on as it is.

    Parameters travel one by one, so that no other rank ever holds more than its own parts. Shared weights come under
    all of their names, as one tensor.

    Args:
        grid: of a model that `parallelize` did not make.

    Raises:
        ValueError: where other code than an optimizer's step changed weights that zero=3 spreads over the replicas.
    """
    stages = getattr(model, "hpctrain_pipeline", None)
    grid = stages.grid if stages else grid_of(model, grid)
    if (replicas := divided_replicas(model)) is not None and replicas.level == 3:
        replicas.check_memory()
    tensors = dict(model.state_dict(keep_vars=True))
    first: dict[int, str] = {}
    names = stages.names if stages else {name: first.setdefault(id(x), name) for name, x in tensors.items()}
    shapes = {names[name]: p.whole_shape for name, p in model.named_parameters() if hasattr(p, "whole_shape")}
    if stages:
        for other in comm.all_gather_object(shapes, grid.pipeline):
            shapes |= other
    gathered = {}
    # ranks may hold parts of buffers too, as ht.layers.BatchNorm2d does; those of stages are whole, and come below
    for name, whole in whole_parameters(model, grid) if stages else whole_state(model, grid):
        if grid.rank == 0:
            gathered[names[name]] = whole.view(shapes.get(names[name], whole.shape))
    others = {name: x for name, x in tensors.items() if not isinstance(x, torch.nn.Parameter)}
    if stages:
        others = _of_all_stages(others, grid)
    if grid.rank:
        return {}
    for name, x in others.items():
        if names.get(name) not in gathered:
            gathered[name] = x.detach().to("cpu", copy=True) if isinstance(x, torch.Tensor) else x
    return {name: gathered[names[name]] for name in (stages.saved if stages else tensors)}


class _Buffer(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype


def _of_all_stages(buffers: dict[str, Any], grid: Grid) -> dict[str, Any]:
    """On the first rank, those of all stages; and what modules give as extra state."""
    if grid.data.rank or grid.tensor.rank:
        return {}
    mine = {name: _Buffer(x.shape, x.dtype) if isinstance(x, torch.Tensor) else x for name, x in buffers.items()}
    described = comm.all_gather_object(mine, grid.pipeline)
    found = dict(buffers)
    for rank, theirs in enumerate(described):
        for name in (name for name in theirs if name not in described[0]):  # in one order
            owner = next(r for r, each in enumerate(described) if name in each)
            if owner != rank:
                continue
            given = theirs[name]
            if not isinstance(given, _Buffer):
                found[name] = given
            elif grid.pipeline.rank == rank:
                comm.send(buffers[name].detach().cpu().contiguous(), grid.pipeline, 0)
            elif grid.pipeline.rank == 0:
                found[name] = comm.recv(torch.empty(given.shape, dtype=given.dtype), grid.pipeline, rank)
    return found


def gather_gradients(model: torch.nn.Module, grid: Grid | None = None) -> dict[str, torch.Tensor]:
    """{name: gradient} of the original module, in host memory, on rank 0 of the grid; empty elsewhere. Collective.

    The names are those of `named_parameters()`. A parameter without a gradient on any rank is left out, as one whose
    `.grad` is None. Gradients travel one by one.

    Args:
        grid: of a model that `parallelize` did not make.

    Raises:
        ValueError: on every rank, when those of replicas are not summed, see `ht.sync_gradients`, or a strategy spreads
            the sums over them.
    """
    grid = grid_of(model, grid)
    if (replicas := replicas_of(model)) is not None:
        replicas.complete(step=True)
    with comm.together(grid.world):
        if replicas is None:
            check_strategy(model, "ht.gather_gradients")
        check_summed(list(model.parameters()), "ht.gather_gradients")
    names = {p: name for name, p in model.named_parameters()}
    with as_tensors():
        if replicas is not None and replicas.divided:
            entries = [
                entry
                for piece, gradient in replicas.gradients()
                if shard_of(piece.parameter).owned(grid.coords)
                for entry in piece.entries(names[piece.parameter], gradient)
            ]
        else:
            there = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
            used = {name for names in comm.all_gather_object(there, grid.world) for name in names}
            entries = [
                Entry(name, shard_of(p), torch.zeros_like(p) if p.grad is None else p.grad)
                for p, name in names.items()
                if name in used and counted(p, grid)
            ]
        shapes = {name: p.whole_shape for p, name in names.items() if hasattr(p, "whole_shape")}
        whole = {name: x.view(shapes.get(name, x.shape)) for name, x in whole_tensors(entries, grid) if grid.rank == 0}
    return {name: whole[name] for name in names.values() if name in whole}
