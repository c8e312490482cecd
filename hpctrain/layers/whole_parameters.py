"""Whole parameters on the first rank, from the slices that the ranks of a grid hold."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch

from hpctrain import comm
from hpctrain.grid import Grid
from hpctrain.parameter import shard_of
from hpctrain.shard_entries import Entry


def whole_parameters(model: torch.nn.Module, grid: Grid) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every parameter of the model, in the same order on every rank; collective.

    The first rank gets the whole tensor, in host memory, one at a time; the others get an empty one.
    """
    here = dict(model.named_parameters())
    local = {name: p for name, p in here.items() if counted(p, grid)}
    reported = grid.comm.allgather({name: (shard_of(p), p.dtype) for name, p in local.items()})
    for name in dict.fromkeys(name for shards in reported for name in shards):
        owners = [rank for rank, shards in enumerate(reported) if name in shards]
        with getattr(here.get(name), "gathered", contextlib.nullcontext()):  # of ZeRO-3, spread over the replicas
            if grid.rank == 0:
                shard, dtype = reported[owners[0]][name]
                whole = torch.empty(shard.global_shape, dtype=dtype)
                for rank in owners:
                    part = reported[rank][name][0]
                    if rank == 0:
                        whole[part.slices] = local[name].detach().cpu().view(part.shape)
                    elif math.prod(part.shape):
                        whole[part.slices] = comm.recv(torch.empty(part.shape, dtype=dtype), grid.world, rank)
                yield name, whole
            else:
                if name in local and 0 not in shard_of(here[name]).shape:
                    comm.send(local[name].detach().cpu(), grid.world, 0)
                yield name, torch.empty(0)


def counted(parameter: torch.nn.Parameter, grid: Grid) -> bool:
    """Whether this rank is the one that counts its slice of the parameter, among all that hold it."""
    shard = shard_of(parameter)
    return grid.alike(shard).rank == 0 and shard.owned(grid.coords)


def whole_tensors(entries: list[Entry], grid: Grid) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of what the entries of all ranks make together, in the same order on every rank; collective.

    The first rank gets the whole tensor, in host memory, one at a time; the others get an empty one.

    Args:
        entries: of every global tensor, each element on one rank.

    Raises:
        ValueError: on every rank, for a tensor of which elements are nowhere.
    """
    mine: dict[str, list[Entry]] = {}
    for entry in entries:
        mine.setdefault(entry.name, []).append(entry)
    reported = grid.comm.allgather(
        {name: [(entry.shard, entry.tensor.dtype) for entry in parts] for name, parts in mine.items()}
    )
    _check_complete(reported)
    for name in dict.fromkeys(name for there in reported for name in there):
        if grid.rank:
            for entry in mine.get(name, ()):
                if entry.tensor.numel():
                    comm.send(_on_host(entry), grid.world, 0)
            yield name, torch.empty(0)
            continue
        shard, dtype = next(there[name][0] for there in reported if name in there)
        whole = torch.empty(shard.global_shape, dtype=dtype)
        for entry in mine.get(name, ()):
            whole[entry.shard.slices] = _on_host(entry)
        for rank, there in enumerate(reported):
            for part, _ in there.get(name, ()) if rank else ():
                if math.prod(part.shape):
                    whole[part.slices] = comm.recv(torch.empty(part.shape, dtype=dtype), grid.world, rank)
        yield name, whole


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
