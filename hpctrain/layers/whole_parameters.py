"""Whole parameters on the first rank, from the slices that the ranks of a grid hold."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch

from hpctrain import comm
from hpctrain.grid import Grid
from hpctrain.parameter import shard_of


def whole_parameters(model: torch.nn.Module, grid: Grid) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every parameter of the model, in the same order on every rank; collective.

    The first rank gets the whole tensor, in host memory, one at a time; the others get an empty one.
    """
    here = dict(model.named_parameters())
    local = {n: p for n, p in here.items() if grid.alike(shard_of(p)).rank == 0 and shard_of(p).owned(grid.coords)}
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
                if name in local and 0 not in shard_of(local[name]).shape:
                    comm.send(local[name].detach().cpu(), grid.world, 0)
                yield name, torch.empty(0)
