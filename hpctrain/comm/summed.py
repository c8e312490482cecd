"""A tensor that is summed over an axis again and again."""

from __future__ import annotations

from functools import partial
from time import perf_counter

import torch

from hpctrain.comm import buffers
from hpctrain.comm.buffers import Work, message, operation
from hpctrain.comm.collectives import all_reduce, all_reduce_start
from hpctrain.comm.shared import Shared
from hpctrain.comm.timing import time_call


class Summed:
    """A flat tensor to fill on every rank of an axis, then replaced by the sum over all. Its creation is collective.

    On one node it lies in memory that all ranks share, where a sum needs no messages, unless another algorithm was
    chosen for the axis. What a sum by MPI is given is made once.

    Attributes: `mine`, this rank's tensor, initially zero.
    """

    def __init__(self, axis, numel: int, like: torch.Tensor, way: str | None = None):
        """`way`: "shared", "prepared" (by MPI) or an algorithm of the axis, by default what was chosen for it."""
        self.axis = axis
        way = way or (_way(axis, numel, like) if axis.size > 1 and numel else "none")
        self.shared = Shared(axis, numel, like.dtype) if way == "shared" else None
        self.mine = self.shared.mine if self.shared else like.new_zeros(numel)
        self._sum = self.shared.sum if self.shared else _by_mpi(self.mine, axis) if way == "prepared" else None
        self._entry = axis.wire.traffic.entry(axis.name, "all_reduce")
        self._moved = 2 * (axis.size - 1) * self.mine.nbytes // axis.size

    def all_reduce(self) -> torch.Tensor:
        """Replace `mine` by the sum."""
        if self._sum is None:
            return all_reduce(self.mine, self.axis)
        wire, entry = self.axis.wire, self._entry
        # `time_call` takes a microsecond, a third of the time that MPI takes for a small sum
        if wire.watch is None and wire.check is None and not wire.traffic.timing:
            start = perf_counter()
            self._sum()
            entry.seconds += perf_counter() - start
        else:
            time_call(self.axis, "all_reduce", Summed._summed, self)
        entry.calls += 1
        entry.sent += self._moved
        entry.received += self._moved
        return self.mine

    def _summed(self):
        self._sum()

    def all_reduce_start(self) -> Work:
        """Begin to replace `mine` by the sum. In shared memory all is done by `wait()`: nothing would progress before,
        and ranks that sum at once wait for the slowest of them each time."""
        return Work([], None, self.all_reduce) if self.shared else all_reduce_start(self.mine, self.axis)


def _way(axis, numel, like):
    one_node = axis.one_node and like.is_cpu
    if axis.reducer is not None:
        way = axis.reducer.way(numel * like.itemsize, one_node)
    else:
        way = "shared" if one_node else "prepared"
    by_mpi = like.is_cpu and like.dtype in buffers.REDUCED_BY_MPI and numel <= buffers.MAX_COUNT
    return "mpi" if way == "prepared" and not by_mpi else way


def _by_mpi(tensor, axis):
    return partial(axis.comm.Allreduce, buffers.in_place(), message(tensor), operation("sum"))
