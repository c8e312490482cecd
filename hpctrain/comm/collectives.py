"""Communication on tensors along an `Axis` of the grid, counted in its ledger.

Every function is collective over the axis. Sizes are rows of dim 0: where ranks hold different numbers of them,
`counts` lists them in rank order, and all ranks must pass the same `counts`. Inputs need not be contiguous; tensors
that are written in place must be. On an axis of size 1 nothing is copied: the result may be the input itself.

Sums over all ranks are taken by MPI, or by the algorithm that `comm.choose_all_reduce` gave the axis.

The functions ending in `_start` return a `Work` at once; the result is valid after its `wait()`.
"""

from __future__ import annotations

import itertools
import math

import torch

from hpctrain.comm import buffers
from hpctrain.comm.buffers import Work, check_reducible, deliver, done, message, operation, reachable
from hpctrain.comm.timing import timed
from hpctrain.shard import split_sizes

# The messages that collectives are made of have a tag of their own; callers of `send` and `recv` use lower ones.
# 32767 is the largest that every MPI allows.
_TAG = 32767

# Sums of fewer bytes are scattered by MPI, in a logarithmic number of messages; above, p-1 exchanges are faster.
_SMALL = 256 * 1024


# Point to point --------------------------------------------------------------------------------------------------


@timed
def send(tensor: torch.Tensor, axis, dest: int, tag: int = 0) -> None:
    """Send to rank `dest` of the axis; returns when the tensor may be changed."""
    host = reachable(tensor.contiguous(), axis.wire.cuda_aware)
    (axis.comm.Ssend if axis.wire.synchronous else axis.comm.Send)(message(host), dest, tag)
    axis.wire.traffic.add(axis.name, "send", sent=tensor.nbytes)


@timed
def send_start(tensor: torch.Tensor, axis, dest: int, tag: int = 0) -> Work:
    """Begin to send; the tensor must not be changed before `wait()`."""
    host = reachable(tensor.contiguous(), axis.wire.cuda_aware)
    request = (axis.comm.Issend if axis.wire.synchronous else axis.comm.Isend)(message(host), dest, tag)
    axis.wire.traffic.add(axis.name, "send", sent=tensor.nbytes)
    return Work([request], None, keep=(host,))


@timed
def recv(out: torch.Tensor, axis, source: int, tag: int = 0) -> torch.Tensor:
    """Receive into `out`, whose shape and dtype are the sender's."""
    return recv_start(out, axis, source, tag).wait()


@timed
def recv_start(out: torch.Tensor, axis, source: int, tag: int = 0) -> Work:
    host = reachable(out, axis.wire.cuda_aware, copy=False)
    request = axis.comm.Irecv(message(host), source, tag)
    axis.wire.traffic.add(axis.name, "recv", received=out.nbytes)
    return Work([request], out, finish=lambda: deliver(host, out))


def probe(axis, tag: int = 0) -> int:
    """Wait for a message with this tag from anybody; returns the rank that sent it, for `recv`."""
    from mpi4py import MPI

    status = MPI.Status()
    axis.comm.Probe(MPI.ANY_SOURCE, tag, status)
    return status.source


# One to all, all to one ------------------------------------------------------------------------------------------


@timed
def broadcast(tensor: torch.Tensor, axis, root: int = 0) -> torch.Tensor:
    """Overwrite `tensor` on every rank by the root's; returns it."""
    if axis.size > 1:
        host = reachable(tensor, axis.wire.cuda_aware)
        axis.comm.Bcast(message(host), root)
        deliver(host, tensor)
        sent, received = (tensor.nbytes, 0) if axis.rank == root else (0, tensor.nbytes)
        axis.wire.traffic.add(axis.name, "broadcast", sent, received)
    return tensor


@timed
def broadcast_start(tensor: torch.Tensor, axis, root: int = 0) -> Work:
    """Begin to overwrite `tensor` on every rank by the root's."""
    if axis.size == 1 or tensor.numel() == 0:
        return done(tensor)
    if tensor.numel() > buffers.MAX_COUNT:
        return done(broadcast(tensor, axis, root))
    host = reachable(tensor, direct=False)  # Open MPI's non-blocking collectives are not CUDA-aware (ompi#9845)
    request = axis.comm.Ibcast(message(host), root)
    sent, received = (tensor.nbytes, 0) if axis.rank == root else (0, tensor.nbytes)
    axis.wire.traffic.add(axis.name, "broadcast", sent, received)
    return Work([request], tensor, finish=lambda: deliver(host, tensor))


@timed
def reduce(tensor: torch.Tensor, axis, root: int = 0) -> torch.Tensor:
    """Sum of all ranks' tensors on the root; zeros elsewhere."""
    if axis.size == 1:
        return tensor
    total = all_reduce(tensor.clone(memory_format=torch.contiguous_format), axis)
    return total if axis.rank == root else total.zero_()


@timed
def gather(tensor: torch.Tensor, axis, counts=None, root: int = 0) -> torch.Tensor:
    """All ranks' rows, in rank order, on the root; no rows elsewhere."""
    if axis.size == 1:
        return tensor
    counts = counts or (len(tensor),) * axis.size
    row = math.prod(tensor.shape[1:])
    nowhere = (0,) * axis.size
    to_root = tuple(row * counts[axis.rank] if rank == root else 0 for rank in range(axis.size))
    from_all = tuple(row * count for count in counts) if axis.rank == root else nowhere
    out = tensor.new_empty((sum(counts) if axis.rank == root else 0, *tensor.shape[1:]))
    # every rank's rows are at the same place of its own tensor
    _exchange(axis, "gather", tensor.contiguous(), to_root, out, from_all, same=True).wait()
    return out


@timed
def scatter(tensor: torch.Tensor, axis, counts, root: int = 0) -> torch.Tensor:
    """This rank's rows of the root's tensor. Elsewhere `tensor` tells only dtype, device and the shape of a row."""
    if axis.size == 1:
        return tensor
    row = math.prod(tensor.shape[1:])
    nowhere = (0,) * axis.size
    to_all = tuple(row * count for count in counts) if axis.rank == root else nowhere
    from_root = tuple(row * counts[axis.rank] if rank == root else 0 for rank in range(axis.size))
    out = tensor.new_empty((counts[axis.rank], *tensor.shape[1:]))
    _exchange(axis, "scatter", tensor.contiguous(), to_all, out, from_root).wait()
    return out


# All to all ------------------------------------------------------------------------------------------------------


@timed
def all_reduce(tensor: torch.Tensor, axis, op: str = "sum") -> torch.Tensor:
    """Replace `tensor` on every rank by the sum, "max" or "min" over all ranks; returns it. All get the same bits.

    Sums of float16 and bfloat16 are taken in float32 and rounded once.
    """
    check_reducible(tensor.dtype, op)
    if axis.size == 1 or tensor.numel() == 0:
        return tensor
    if axis.reducer is not None and op == "sum":
        return axis.reducer.all_reduce(tensor)
    return all_reduce_by_mpi(tensor, axis, op)


def all_reduce_by_mpi(tensor: torch.Tensor, axis, op: str = "sum") -> torch.Tensor:
    """`all_reduce` whatever the axis's own algorithm for sums, on at least two ranks and one element."""
    if tensor.dtype in buffers.REDUCED_HERE:
        flat = tensor.view(-1)
        counts = split_sizes(flat.numel(), axis.size)
        flat.copy_(all_gather(reduce_scatter(flat, axis, counts), axis, counts))
        return tensor
    host = reachable(tensor, axis.wire.cuda_aware)
    for start in range(0, host.numel(), buffers.MAX_COUNT):
        count = min(buffers.MAX_COUNT, host.numel() - start)
        axis.comm.Allreduce(buffers.in_place(), message(host, start, count), operation(op))
    _count_all_reduce(tensor, axis)
    return deliver(host, tensor)


@timed
def all_reduce_start(tensor: torch.Tensor, axis) -> Work:
    """Begin to replace `tensor` by the sum over all ranks. float16 and bfloat16 travel as float32."""
    check_reducible(tensor.dtype, "sum")
    if axis.size == 1 or tensor.numel() == 0:
        return done(tensor)
    return all_reduce_by_mpi_start(tensor, axis) if axis.reducer is None else axis.reducer.all_reduce_start(tensor)


def all_reduce_by_mpi_start(tensor: torch.Tensor, axis) -> Work:
    if tensor.numel() > buffers.MAX_COUNT:
        return done(all_reduce_by_mpi(tensor, axis))
    wide = tensor.float() if tensor.dtype in buffers.REDUCED_HERE else tensor
    host = reachable(wide, direct=False)  # Open MPI's non-blocking collectives are not CUDA-aware (ompi#9845)
    request = axis.comm.Iallreduce(buffers.in_place(), message(host), operation("sum"))
    _count_all_reduce(wide, axis)
    return Work([request], tensor, finish=lambda: deliver(host, tensor))


@timed
def all_gather(tensor: torch.Tensor, axis, counts=None) -> torch.Tensor:
    """All ranks' rows, in rank order, on every rank."""
    size = axis.size
    if size == 1:
        return tensor
    tensor = tensor.contiguous()
    out = _room(tensor, axis, counts)
    if out.numel() > buffers.MAX_COUNT:
        return all_gather_start(tensor, axis, counts).wait()
    own = reachable(tensor, axis.wire.cuda_aware)
    host = reachable(out, axis.wire.cuda_aware, copy=False)
    if counts is None:
        axis.comm.Allgather(message(own), message(host))
    else:
        row = math.prod(tensor.shape[1:])
        memory, datatype = message(host)
        axis.comm.Allgatherv(message(own), [memory, [row * count for count in counts], datatype])
    axis.wire.traffic.add(axis.name, "all_gather", (size - 1) * own.nbytes, host.nbytes - own.nbytes)
    return deliver(host, out)


@timed
def all_gather_start(tensor: torch.Tensor, axis, counts=None, out: torch.Tensor | None = None) -> Work:
    """Begin `all_gather`, into `out` where it is given; `tensor` may be this rank's rows of it."""
    if axis.size == 1:
        return done(tensor)
    out = _room(tensor, axis, counts) if out is None else out
    row = math.prod(tensor.shape[1:])
    sizes = tuple(row * count for count in counts or (len(tensor),) * axis.size)
    return _exchange(axis, "all_gather", tensor.contiguous(), (tensor.numel(),) * axis.size, out, sizes, same=True)


@timed
def reduce_scatter(tensor: torch.Tensor, axis, counts=None, dtype: torch.dtype | None = None) -> torch.Tensor:
    """This rank's rows of the sum of all ranks' tensors, which all have sum(counts) rows.

    Large tensors take p-1 exchanges, each added as it comes; this receives only what it must, where Open MPI's
    Reduce_scatter_block receives 3.4 times that. float16 and bfloat16 are summed in float32, and rounded to `dtype`,
    by default their own.
    """
    check_reducible(tensor.dtype, "sum")
    size, rank = axis.size, axis.rank
    if size == 1:
        return tensor
    counts = counts or even_rows(len(tensor), size)
    tensor = tensor.contiguous()
    row = math.prod(tensor.shape[1:])
    first = sum(counts[:rank])
    moved = (len(tensor) - counts[rank]) * row * tensor.itemsize, (size - 1) * counts[rank] * row * tensor.itemsize
    axis.wire.traffic.add(axis.name, "reduce_scatter", *moved)
    host = reachable(tensor, axis.wire.cuda_aware)
    if tensor.nbytes < _SMALL and tensor.dtype in buffers.REDUCED_BY_MPI:
        out = host.new_empty((counts[rank], *tensor.shape[1:]))
        axis.comm.Reduce_scatter(message(host), message(out), [row * count for count in counts])
        return out.to(tensor.device)
    mine = host.narrow(0, first, counts[rank])
    total = mine.float() if tensor.dtype in buffers.REDUCED_HERE else mine.clone()
    arriving = torch.empty_like(mine)
    for step in range(1, size):
        dest, source = (rank + step) % size, (rank - step) % size
        leaving = message(host, row * sum(counts[:dest]), row * counts[dest])
        axis.comm.Sendrecv(leaving, dest, _TAG, message(arriving), source, _TAG)
        total += arriving
    return total.to(tensor.device, dtype or tensor.dtype)


@timed
def reduce_scatter_start(tensor: torch.Tensor, axis, counts=None, dtype: torch.dtype | None = None) -> Work:
    check_reducible(tensor.dtype, "sum")
    if axis.size == 1:
        return done(tensor)
    counts = counts or even_rows(len(tensor), axis.size)
    tensor = tensor.contiguous()
    row = math.prod(tensor.shape[1:])
    held = counts[axis.rank]
    parts = tensor.new_empty((axis.size, held, *tensor.shape[1:]))
    wide = torch.float32 if tensor.dtype in buffers.REDUCED_HERE else tensor.dtype
    sizes = tuple(row * count for count in counts)
    return _exchange(
        axis, "reduce_scatter", tensor, sizes, parts, (row * held,) * axis.size,
        then=lambda parts: parts.sum(0, dtype=wide).to(dtype or tensor.dtype),
    )  # fmt: skip


@timed
def all_to_all(tensor: torch.Tensor, axis, send_counts=None, recv_counts=None) -> torch.Tensor:
    """Rows `send_counts[r]` of this rank's tensor go to rank r; the rows received, in rank order, are returned.

    Without counts, each rank sends equally many rows to each.
    """
    if axis.size == 1:
        return tensor
    send_counts = send_counts or even_rows(len(tensor), axis.size)
    recv_counts = recv_counts or send_counts
    out = tensor.new_empty((sum(recv_counts), *tensor.shape[1:]))
    row = math.prod(tensor.shape[1:])
    sends, receives = (tuple(row * count for count in counts) for counts in (send_counts, recv_counts))
    return _exchange(axis, "all_to_all", tensor.contiguous(), sends, out, receives).wait()


def even_rows(rows: int, parts: int) -> tuple[int, ...]:
    if rows % parts:
        raise ValueError(f"{rows} rows do not divide evenly over {parts} ranks; pass counts")
    return (rows // parts,) * parts


# Pieces ----------------------------------------------------------------------------------------------------------


def _exchange(axis, name, tensor, sends, out, receives, same=False, then=None) -> Work:
    """Begin to send sends[r] elements of `tensor` to each rank r, and to receive receives[r] into `out`, both in order.

    With `same`, every rank is sent the same elements, from the start of `tensor`. `then` makes the result from `out`.
    """
    size, rank = axis.size, axis.rank
    give = reachable(tensor, axis.wire.cuda_aware)
    take = reachable(out, axis.wire.cuda_aware, copy=False)
    given = (0,) * size if same else tuple(itertools.accumulate(sends, initial=0))
    taken = tuple(itertools.accumulate(receives, initial=0))
    requests = []
    for step in range(1, size):
        source = (rank - step) % size
        if receives[source]:
            part = message(take, taken[source], receives[source])
            requests.append(axis.comm.Irecv(part, source, _TAG))
    for step in range(1, size):
        dest = (rank + step) % size
        if sends[dest]:
            requests.append(axis.comm.Isend(message(give, given[dest], sends[dest]), dest, _TAG))
    if receives[rank]:
        kept = give.view(-1).narrow(0, given[rank], sends[rank])
        take.view(-1).narrow(0, taken[rank], receives[rank]).copy_(kept)
    sent, received = sum(sends) - sends[rank], sum(receives) - receives[rank]
    axis.wire.traffic.add(axis.name, name, sent * tensor.itemsize, received * tensor.itemsize)

    def finish():
        deliver(take, out)
        return out if then is None else then(out)

    return Work(requests, out, finish, keep=(give,))


def _room(tensor, axis, counts):
    """A tensor for every rank's rows."""
    if counts is None:
        return tensor.new_empty((axis.size * len(tensor), *tensor.shape[1:]))
    held = counts[axis.rank]
    if held != len(tensor):
        raise ValueError(f"rank {axis.rank} of {axis.name} holds {len(tensor)} rows, but counts say {held}: {counts}")
    return tensor.new_empty((sum(counts), *tensor.shape[1:]))


def _count_all_reduce(tensor, axis):
    moved = 2 * (axis.size - 1) * tensor.nbytes // axis.size
    axis.wire.traffic.add(axis.name, "all_reduce", moved, moved)
