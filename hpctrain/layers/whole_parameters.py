"""Whole parameters and buffers on the first rank, from the slices that the ranks of a grid hold."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch

from hpctrain import comm
from hpctrain.grid import Grid
from hpctrain.parameter import shard_of
from hpctrain.shard import Shard
from hpctrain.shard_entries import Entry


def whole_parameters(model: torch.nn.Module, grid: Grid) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every parameter of the model, in the same order on every rank; collective.

    The first rank gets the whole tensor, in host memory, one at a time; the others get an empty one.
    """
    here = dict(model.named_parameters())
    entries = [Entry(name, shard_of(p), p) for name, p in here.items() if counted(p, grid)]

    def gathered(name):  # of ZeRO-3, spread over the replicas
        return getattr(here.get(name), "gathered", contextlib.nullcontext())

    return whole_tensors(entries, grid, gathered)


def whole_state(model: torch.nn.Module, grid: Grid) -> Iterator[tuple[str, torch.Tensor]]:
    """The same with the buffers that `state_dict()` has, after the parameters; collective."""
    shards = shards_of_buffers(model, grid)
    entries = [Entry(name, shard, model.get_buffer(name)) for name, shard in shards.items() if _counted(shard, grid)]
    return itertools.chain(whole_parameters(model, grid), whole_tensors(entries, grid))


def shards_of_buffers(model: torch.nn.Module, grid: Grid) -> dict[str, Shard]:
    """Of the buffers that `state_dict()` has, by name: a layer that divides its own says so by `shard`; others are
    whole on every rank. Collective, as stages of a pipeline may have the same buffer."""
    kept = model.state_dict(keep_vars=True)
    found = {name: each for name, each in model.named_buffers() if name in kept and not each.is_meta}
    stages = grid.pipeline.comm.allgather(set(found)) if grid.pipeline.size > 1 else []
    shards = {}
    for name, buffer in found.items():
        shard = getattr(model.get_submodule(name.rpartition(".")[0]), "shard", None)
        if not isinstance(shard, Shard) or shard.shape != buffer.shape:
            shard = Shard.whole(buffer.shape, replicated=("x", "y", "z"))
        holders = tuple(rank for rank, names in enumerate(stages) if name in names)
        shards[name] = dataclasses.replace(shard, holders=holders if len(holders) > 1 else ())
    return shards


def counted(parameter: torch.nn.Parameter, grid: Grid) -> bool:
    """Whether this rank is the one that counts its slice of the parameter, among all that hold it."""
    return _counted(shard_of(parameter), grid)


def _counted(shard: Shard, grid: Grid) -> bool:
    return grid.alike(shard).rank == 0 and shard.owned(grid.coords)


def whole_tensors(
    entries: list[Entry], grid: Grid, readable: Callable[[str], AbstractContextManager] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of what the entries of all ranks make together, in the same order on every rank; collective.

    The first rank gets the whole tensor, in host memory, one at a time; the others get an empty one.

    Args:
        entries: of every global tensor, each element on one rank.
        readable: what its tensors must be read within, by name; on every rank.

    Raises:
        ValueError: on every rank, for a tensor of which elements are nowhere.
    """
    mine: dict[str, list[Entry]] = {}
    for entry in entries:
        mine.setdefault(entry.name, []).append(entry)
    described = {name: [(entry.shard, entry.tensor.dtype) for entry in parts] for name, parts in mine.items()}
    reported = comm.all_gather_object(described, grid.world)
    _check_complete(reported)
    for name in dict.fromkeys(name for there in reported for name in there):
        with readable(name) if readable else contextlib.nullcontext():
            if grid.rank == 0:
                yield name, _received(name, mine.get(name, ()), reported, grid)
            else:
                for entry in mine.get(name, ()):
                    if math.prod(entry.shard.shape):
                        comm.send(_on_host(entry), grid.world, 0)
                yield name, torch.empty(0)


def _received(name, own, reported, grid):
    shard, dtype = next(there[name][0] for there in reported if name in there)
    whole = torch.empty(shard.global_shape, dtype=dtype)
    for entry in own:
        whole[entry.shard.slices] = _on_host(entry)
    for rank, there in enumerate(reported):
        for part, _ in there.get(name, ()) if rank else ():
            if math.prod(part.shape):
                whole[part.slices] = comm.recv(torch.empty(part.shape, dtype=dtype), grid.world, rank)
    return whole


def _on_host(entry):
    return entry.tensor.detach().cpu().contiguous().view(entry.shard.shape)


def _check_complete(reported: list[dict[str, list]]) -> None:
    elements: dict[str, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for there in reported:
        for name, parts in there.items():
            shapes[name] = parts[0][0].global_shape
            elements[name] = elements.get(name, 0) + sum(math.prod(shard.shape) for shard, _ in parts)
    for name, shape in shapes.items():
        if elements[name] < math.prod(shape):
            raise ValueError(f"some ranks have nothing of {name!r}, of which others hold a part")
