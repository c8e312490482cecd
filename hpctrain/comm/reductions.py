"""Sums over an axis, on every rank of it: by MPI, or by the algorithm that `comm.choose_all_reduce` gave the axis."""

from __future__ import annotations

import torch

from hpctrain.comm import buffers
from hpctrain.comm.buffers import Work, check_reducible, deliver, done, message, operation, reachable
from hpctrain.comm.collectives import all_gather, reduce_scatter
from hpctrain.comm.timing import timed
from hpctrain.grid import Axis
from hpctrain.shard import split_sizes


@timed
def all_reduce(tensor: torch.Tensor, axis: Axis, op: str = "sum") -> torch.Tensor:
    """Replace `tensor` on every rank by the sum, "max" or "min" over all ranks; returns it. All get the same bits.

    Sums of float16 and bfloat16 are taken in float32 and rounded once.
    """
    check_reducible(tensor.dtype, op)
    if axis.size == 1 or tensor.numel() == 0:
        return tensor
    reducer = axis.transport.reducers.get(axis)
    if reducer is not None and op == "sum":
        return reducer.all_reduce(tensor)
    return all_reduce_by_mpi(tensor, axis, op)


def all_reduce_by_mpi(tensor: torch.Tensor, axis: Axis, op: str = "sum") -> torch.Tensor:
    """`all_reduce` whatever the axis's own algorithm for sums, on at least two ranks and one element."""
    if tensor.dtype in buffers.REDUCED_HERE:
        flat = tensor.view(-1)
        counts = split_sizes(flat.numel(), axis.size)
        flat.copy_(all_gather(reduce_scatter(flat, axis, counts), axis, counts))
        return tensor
    host = reachable(tensor, axis.transport.cuda_aware)
    for start in range(0, host.numel(), buffers.MAX_COUNT):
        count = min(buffers.MAX_COUNT, host.numel() - start)
        axis.comm.Allreduce(buffers.in_place(), message(host, start, count), operation(op))
    _count_all_reduce(tensor, axis)
    return deliver(host, tensor)


@timed
def all_reduce_start(tensor: torch.Tensor, axis: Axis, op: str = "sum") -> Work[torch.Tensor]:
    """Begin to replace `tensor` by the sum, "max" or "min" over all ranks. float16 and bfloat16 travel as float32."""
    check_reducible(tensor.dtype, op)
    if axis.size == 1 or tensor.numel() == 0:
        return done(tensor)
    reducer = axis.transport.reducers.get(axis)
    if reducer is not None and op == "sum":
        return reducer.all_reduce_start(tensor)
    return all_reduce_by_mpi_start(tensor, axis, op)


def all_reduce_by_mpi_start(tensor: torch.Tensor, axis: Axis, op: str = "sum") -> Work[torch.Tensor]:
    if tensor.numel() > buffers.MAX_COUNT:
        return done(all_reduce_by_mpi(tensor, axis, op))
    wide = tensor.float() if tensor.dtype in buffers.REDUCED_HERE else tensor
    host = reachable(wide, direct=False)  # Open MPI's non-blocking collectives are not CUDA-aware (ompi#9845)
    request = axis.comm.Iallreduce(buffers.in_place(), message(host), operation(op))
    _count_all_reduce(wide, axis)
    return Work([request], tensor, finish=lambda: deliver(host, tensor))


def _count_all_reduce(tensor: torch.Tensor, axis: Axis) -> None:
    moved = 2 * (axis.size - 1) * tensor.nbytes // axis.size
    axis.transport.traffic.add(axis.name, "all_reduce", moved, moved)
