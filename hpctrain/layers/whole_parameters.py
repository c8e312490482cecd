"""Whole parameters on the first rank, from the slices that the ranks of a grid hold."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import torch

from hpctrain import comm
from hpctrain.grid import Grid
from hpctrain.parameter import shard_of


def whole_parameters(
    model: torch.nn.Module, grid: Grid, local_tensor: Callable[[torch.nn.Parameter], torch.Tensor | None] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every parameter of the model, in the same order on every rank; collective.

    The first rank gets the whole tensor, in host memory, one at a time; the others get an empty one.

    Args:
        local_tensor: what this rank holds of a parameter, where it is something else than its weights, such as its
            gradient; a parameter for which it is None on all ranks is left out.

    Raises:
        ValueError: on every rank, when some ranks hold a part of a parameter, and others None.
    """
    here = dict(model.named_parameters())
    local = {}
    for name, p in here.items():
        if grid.alike(shard_of(p)).rank == 0 and shard_of(p).owned(grid.coords):
            tensor = p if local_tensor is None else local_tensor(p)
            if tensor is not None:
                local[name] = tensor
    reported = grid.comm.allgather({name: (shard_of(here[name]), tensor.dtype) for name, tensor in local.items()})
    if local_tensor is not None:
        _check_complete(reported)
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


def _check_complete(reported: list[dict[str, tuple]]) -> None:
    elements: dict[str, int] = {}
    for shards in reported:
        for name, (shard, _) in shards.items():
            elements[name] = elements.get(name, 0) + math.prod(shard.shape)
    for shards in reported:
        for name, (shard, _) in shards.items():
            if elements[name] < math.prod(shard.global_shape):
                raise ValueError(f"some ranks have nothing of {name!r}, of which others hold a part")
