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

    Sums of float16 and bfloat16 are taken in float32 and rounded once. A maximum or minimum is NaN where a rank has
    NaN, as torch's.
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
    if op != "sum" and tensor.is_floating_point():
        return tensor.copy_(_floats(all_reduce_by_mpi(_in_order(tensor, op), axis, op)))
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
    if op != "sum" and tensor.is_floating_point():
        work = all_reduce_by_mpi_start(_in_order(tensor, op), axis, op)
        return work.then(lambda integers: tensor.copy_(_floats(integers)))
    wide = tensor.float() if tensor.dtype in buffers.REDUCED_HERE else tensor
    host = reachable(wide, direct=False)  # Open MPI's non-blocking collectives are not CUDA-aware (ompi#9845)
    request = axis.comm.Iallreduce(buffers.in_place(), message(host), operation(op))
    _count_all_reduce(wide, axis)
    return Work([request], tensor, finish=lambda: deliver(host, tensor))


_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}
_FLOATS = {integers: floats for floats, integers in _INTEGERS.items()}


def _in_order(floats: torch.Tensor, op: str) -> torch.Tensor:
    """Integers in the order of the floats, NaN before all of them in `op`: MPI compares floats, and what it gives where
    one is NaN depends on the order of its messages and is often neither NaN nor the largest of the others."""
    integers = _swapped(floats.view(_INTEGERS[floats.dtype]))
    limits = torch.iinfo(integers.dtype)
    return torch.where(floats.isnan(), limits.max if op == "max" else limits.min, integers)


def _floats(integers: torch.Tensor) -> torch.Tensor:
    """Those of which `_in_order` made them."""
    return _swapped(integers).view(_FLOATS[integers.dtype])


def _swapped(integers: torch.Tensor) -> torch.Tensor:
    """With the order of the negative ones reversed: floats have the sign and the size apart. Its own inverse."""
    limits = torch.iinfo(integers.dtype)
    return integers ^ (integers >> (limits.bits - 1) & limits.max)


def _count_all_reduce(tensor: torch.Tensor, axis: Axis) -> None:
    moved = 2 * (axis.size - 1) * tensor.nbytes // axis.size
    axis.transport.traffic.add(axis.name, "all_reduce", moved, moved)
