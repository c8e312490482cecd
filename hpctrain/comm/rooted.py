"""Collectives with a root: one rank of an axis gives to all, or gets from all. See `comm.collectives`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hpctrain.comm import buffers
from hpctrain.comm.buffers import Work, deliver, done, message, reachable
from hpctrain.comm.collectives import check_counts, check_own_count
from hpctrain.comm.exchange import exchange
from hpctrain.comm.reductions import all_reduce
from hpctrain.comm.timing import timed
from hpctrain.grid import Axis


@timed
def broadcast(tensor: torch.Tensor, axis: Axis, root: int = 0) -> torch.Tensor:
    """Overwrite `tensor` on every rank by the root's; returns it."""
    _check_root(root, axis)
    if axis.size > 1:
        host = reachable(tensor, axis.transport.cuda_aware)
        axis.comm.Bcast(message(host), root)
        deliver(host, tensor)
        sent, received = (tensor.nbytes, 0) if axis.rank == root else (0, tensor.nbytes)
        axis.transport.traffic.add(axis.name, "broadcast", sent, received)
    return tensor


@timed
def broadcast_start(tensor: torch.Tensor, axis: Axis, root: int = 0) -> Work[torch.Tensor]:
    """Begin to overwrite `tensor` on every rank by the root's."""
    _check_root(root, axis)
    if axis.size == 1 or tensor.numel() == 0:
        return done(tensor)
    if tensor.numel() > buffers.MAX_COUNT:
        return done(broadcast(tensor, axis, root))
    host = reachable(tensor, direct=False)  # Open MPI's non-blocking collectives are not CUDA-aware (ompi#9845)
    request = axis.comm.Ibcast(message(host), root)
    sent, received = (tensor.nbytes, 0) if axis.rank == root else (0, tensor.nbytes)
    axis.transport.traffic.add(axis.name, "broadcast", sent, received)
    return Work([request], tensor, finish=lambda: deliver(host, tensor))


@timed
def reduce(tensor: torch.Tensor, axis: Axis, root: int = 0) -> torch.Tensor:
    """Sum of all ranks' tensors on the root; zeros elsewhere."""
    _check_root(root, axis)
    if axis.size == 1:
        return tensor
    total = all_reduce(tensor.clone(memory_format=torch.contiguous_format), axis)
    return total if axis.rank == root else total.zero_()


@timed
def gather(tensor: torch.Tensor, axis: Axis, counts: Sequence[int] | None = None, root: int = 0) -> torch.Tensor:
    """All ranks' rows, in rank order, on the root; no rows elsewhere."""
    _check_root(root, axis)
    if axis.size == 1:
        return tensor
    counts = counts or (len(tensor),) * axis.size
    check_own_count(counts, axis, len(tensor))
    row = math.prod(tensor.shape[1:])
    nowhere = (0,) * axis.size
    to_root = tuple(row * counts[axis.rank] if rank == root else 0 for rank in range(axis.size))
    from_all = tuple(row * count for count in counts) if axis.rank == root else nowhere
    out = tensor.new_empty((sum(counts) if axis.rank == root else 0, *tensor.shape[1:]))
    # every rank's rows are at the same place of its own tensor
    exchange(axis, "gather", tensor.contiguous(), to_root, out, from_all, same=True).wait()
    return out


@timed
def scatter(tensor: torch.Tensor, axis: Axis, counts: Sequence[int], root: int = 0) -> torch.Tensor:
    """This rank's rows of the root's tensor. Elsewhere `tensor` tells only dtype, device and the shape of a row."""
    _check_root(root, axis)
    if axis.size == 1:
        return tensor
    check_counts(counts, axis, len(tensor) if axis.rank == root else sum(counts))
    row = math.prod(tensor.shape[1:])
    nowhere = (0,) * axis.size
    to_all = tuple(row * count for count in counts) if axis.rank == root else nowhere
    from_root = tuple(row * counts[axis.rank] if rank == root else 0 for rank in range(axis.size))
    out = tensor.new_empty((counts[axis.rank], *tensor.shape[1:]))
    exchange(axis, "scatter", tensor.contiguous(), to_all, out, from_root).wait()
    return out


def _check_root(root: int, axis: Axis) -> None:
    if not 0 <= root < axis.size:
        raise ValueError(f"root must be a rank of {axis.name}, from 0 to {axis.size - 1}, got {root!r}")
