"""Communication on tensors along an `Axis` of the grid, counted in its ledger.

Every function is collective over the axis. Sizes are rows of dim 0: where ranks hold different numbers of them,
`counts` lists them in rank order, and all ranks must pass the same `counts`. Inputs need not be contiguous; tensors
that are written in place must be. On an axis of size 1 nothing is copied: the result may be the input itself.

The functions ending in `_start` return a `Work` at once; the result is valid after its `wait()`. They send a message to
every other rank, but where there are many and the blocks small: then they are done when they return (`circulant`).

The same holds of `point_to_point`, `rooted` (broadcast, reduce, gather, scatter) and `reductions` (all_reduce).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hpctrain.comm import buffers, circulant
from hpctrain.comm.buffers import Work, check_reducible, deliver, done, message, reachable
from hpctrain.comm.exchange import TAG, exchange
from hpctrain.comm.timing import timed
from hpctrain.grid import Axis

# Sums of fewer bytes are scattered by MPI, in a logarithmic number of messages; above, p-1 exchanges are faster.
_SMALL = 256 * 1024


@timed
def all_gather(tensor: torch.Tensor, axis: Axis, counts: Sequence[int] | None = None) -> torch.Tensor:
    """All ranks' rows, in rank order, on every rank."""
    size = axis.size
    if size == 1:
        return tensor
    tensor = tensor.contiguous()
    out = _rows_of_all(tensor, axis, counts)
    if out.numel() > buffers.MAX_COUNT:
        return all_gather_start(tensor, axis, counts).wait()
    own = reachable(tensor, axis.transport.cuda_aware)
    host = reachable(out, axis.transport.cuda_aware, copy=False)
    if counts is None:
        axis.comm.Allgather(message(own), message(host))
    else:
        row = math.prod(tensor.shape[1:])
        memory, datatype = message(host)
        axis.comm.Allgatherv(message(own), [memory, [row * count for count in counts], datatype])
    axis.transport.traffic.add(axis.name, "all_gather", (size - 1) * own.nbytes, host.nbytes - own.nbytes)
    return deliver(host, out)


@timed
def all_gather_start(
    tensor: torch.Tensor, axis: Axis, counts: Sequence[int] | None = None, out: torch.Tensor | None = None
) -> Work[torch.Tensor]:
    """Begin `all_gather`, into `out` where it is given; `tensor` may be this rank's rows of it."""
    if axis.size == 1:
        return done(tensor)
    out = _rows_of_all(tensor, axis, counts) if out is None else out
    row = math.prod(tensor.shape[1:])
    sizes = tuple(row * count for count in counts or (len(tensor),) * axis.size)
    if circulant.pays(axis, counts or (len(tensor),), row * tensor.itemsize):
        host = reachable(out, axis.transport.cuda_aware, copy=False)
        host.view(-1).narrow(0, sum(sizes[: axis.rank]), tensor.numel()).copy_(tensor.reshape(-1))
        _count(axis, "all_gather", host, *circulant.all_gather(host, sizes, axis))
        return done(deliver(host, out))
    return exchange(axis, "all_gather", tensor.contiguous(), (tensor.numel(),) * axis.size, out, sizes, same=True)


@timed
def reduce_scatter(
    tensor: torch.Tensor, axis: Axis, counts: Sequence[int] | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """This rank's rows of the sum of all ranks' tensors, which all have sum(counts) rows.

    Large tensors take p-1 exchanges, each added as it comes; this receives only what it must, where Open MPI's
    Reduce_scatter_block receives 3.4 times that. float16 and bfloat16 are summed in float32, and rounded to `dtype`,
    by default their own.
    """
    check_reducible(tensor.dtype, "sum")
    size, rank = axis.size, axis.rank
    if size == 1:
        return tensor.to(dtype or tensor.dtype)
    counts = counts or even_rows(len(tensor), size)
    check_counts(counts, axis, len(tensor))
    tensor = tensor.contiguous()
    row = math.prod(tensor.shape[1:])
    by_mpi = tensor.nbytes < _SMALL and tensor.dtype in buffers.REDUCED_BY_MPI
    if not by_mpi and circulant.pays(axis, counts, row * buffers.accumulation_dtype(tensor.dtype).itemsize):
        return _sum_small_blocks(tensor, axis, counts, dtype)
    first = sum(counts[:rank])
    _count(axis, "reduce_scatter", tensor, (len(tensor) - counts[rank]) * row, (size - 1) * counts[rank] * row)
    host = reachable(tensor, axis.transport.cuda_aware)
    if by_mpi:
        out = host.new_empty((counts[rank], *tensor.shape[1:]))
        axis.comm.Reduce_scatter(message(host), message(out), [row * count for count in counts])
        return out.to(tensor.device, dtype or tensor.dtype)
    mine = host.narrow(0, first, counts[rank])
    total = mine.float() if tensor.dtype in buffers.REDUCED_HERE else mine.clone()
    arriving = torch.empty_like(mine)
    for step in range(1, size):
        dest, source = (rank + step) % size, (rank - step) % size
        leaving = message(host, row * sum(counts[:dest]), row * counts[dest])
        axis.comm.Sendrecv(leaving, dest, TAG, message(arriving), source, TAG)
        total += arriving
    return total.to(tensor.device, dtype or tensor.dtype)


@timed
def reduce_scatter_start(
    tensor: torch.Tensor, axis: Axis, counts: Sequence[int] | None = None, dtype: torch.dtype | None = None
) -> Work[torch.Tensor]:
    check_reducible(tensor.dtype, "sum")
    if axis.size == 1:
        return done(tensor.to(dtype or tensor.dtype))
    counts = counts or even_rows(len(tensor), axis.size)
    check_counts(counts, axis, len(tensor))
    tensor = tensor.contiguous()
    row = math.prod(tensor.shape[1:])
    local = counts[axis.rank]
    wide = buffers.accumulation_dtype(tensor.dtype)
    if circulant.pays(axis, counts, row * wide.itemsize):
        return done(_sum_small_blocks(tensor, axis, counts, dtype))
    sizes = tuple(row * count for count in counts)
    parts = tensor.new_empty((axis.size, local, *tensor.shape[1:]))
    return exchange(
        axis, "reduce_scatter", tensor, sizes, parts, (row * local,) * axis.size,
        then=lambda parts: parts.sum(0, dtype=wide).to(dtype or tensor.dtype),
    )  # fmt: skip


def _sum_small_blocks(
    tensor: torch.Tensor, axis: Axis, counts: Sequence[int], dtype: torch.dtype | None
) -> torch.Tensor:
    total = reachable(tensor, axis.transport.cuda_aware).to(buffers.accumulation_dtype(tensor.dtype), copy=True)
    row = math.prod(tensor.shape[1:])
    _count(axis, "reduce_scatter", total, *circulant.reduce_scatter(total, [row * count for count in counts], axis))
    own = total.narrow(0, sum(counts[: axis.rank]), counts[axis.rank])
    return own.to(tensor.device, dtype or tensor.dtype, copy=True)


@timed
def all_to_all(
    tensor: torch.Tensor, axis: Axis, send_counts: Sequence[int] | None = None, recv_counts: Sequence[int] | None = None
) -> torch.Tensor:
    """Rows `send_counts[r]` of this rank's tensor go to rank r; the rows received, in rank order, are returned.

    Without counts, each rank sends equally many rows to each.
    """
    if axis.size == 1:
        return tensor
    row, even = math.prod(tensor.shape[1:]), send_counts is None and recv_counts is None
    send_counts = send_counts or even_rows(len(tensor), axis.size)
    if even and circulant.pays(axis, send_counts, row * tensor.itemsize, circulant.SWAPPED_BYTES):
        host = reachable(tensor.contiguous(), axis.transport.cuda_aware)
        came, moved = circulant.all_to_all(host.view(axis.size, row * send_counts[0]), axis)
        _count(axis, "all_to_all", came, moved, moved)
        return came.view(tensor.shape).to(tensor.device)
    return all_to_all_start(tensor, axis, send_counts, recv_counts or send_counts).wait()


@timed
def all_to_all_start(
    tensor: torch.Tensor, axis: Axis, send_counts: Sequence[int], recv_counts: Sequence[int]
) -> Work[torch.Tensor]:
    """Begin `all_to_all`."""
    if axis.size == 1:
        return done(tensor)
    check_counts(send_counts, axis, len(tensor))
    row = math.prod(tensor.shape[1:])
    out = tensor.new_empty((sum(recv_counts), *tensor.shape[1:]))
    sends, receives = (tuple(row * count for count in counts) for counts in (send_counts, recv_counts))
    return exchange(axis, "all_to_all", tensor.contiguous(), sends, out, receives)


def even_rows(rows: int, parts: int) -> tuple[int, ...]:
    if rows % parts:
        raise ValueError(f"{rows} rows do not divide evenly over {parts} ranks; pass counts")
    return (rows // parts,) * parts


def check_counts(counts: Sequence[int], axis: Axis, rows: int) -> None:
    """Raise ValueError unless `counts` says for each rank of the axis how many of a tensor's rows are for it."""
    if len(counts) != axis.size or sum(counts) != rows:
        raise ValueError(
            f"counts must be {axis.size} numbers, one for each rank of {axis.name}, that add up to the tensor's {rows} "
            f"rows, got {tuple(counts)}"
        )


def check_own_count(counts: Sequence[int], axis: Axis, rows: int) -> None:
    """Raise ValueError unless `counts` says of each rank of the axis how many rows it has, of this one `rows`."""
    if len(counts) != axis.size or counts[axis.rank] != rows:
        raise ValueError(
            f"counts must be {axis.size} numbers, one for each rank of {axis.name}, and that of rank {axis.rank} its "
            f"tensor's {rows} rows, got {tuple(counts)}"
        )


def _count(axis: Axis, name: str, like: torch.Tensor, sent: int, received: int) -> None:
    axis.transport.traffic.add(axis.name, name, sent * like.itemsize, received * like.itemsize)


def _rows_of_all(tensor: torch.Tensor, axis: Axis, counts: Sequence[int] | None) -> torch.Tensor:
    """A tensor for every rank's rows."""
    if counts is None:
        return tensor.new_empty((axis.size * len(tensor), *tensor.shape[1:]))
    check_own_count(counts, axis, len(tensor))
    return tensor.new_empty((sum(counts), *tensor.shape[1:]))
