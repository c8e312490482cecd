"""A tensor that is summed over an axis again and again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter

import torch

from hpctrain.comm import buffers
from hpctrain.comm.all_reduce_table import DEFAULT
from hpctrain.comm.buffers import Work, message, operation
from hpctrain.comm.path import Path, path_of
from hpctrain.comm.reductions import all_reduce, all_reduce_start
from hpctrain.comm.shared_memory_buffer import SharedMemoryBuffer
from hpctrain.comm.timing import time_call
from hpctrain.grid import Axis


class AllReduceBuffer:
    """A flat tensor to fill on every rank of an axis, then replaced by the sum over all. Its creation is collective.

    On one node it lies in memory that all ranks share, where a sum needs no messages, unless another algorithm was
    chosen for the axis. What a sum by MPI is given is made once.

    Attributes: `local`, this rank's tensor, initially zero.
    """

    def __init__(self, axis: Axis, numel: int, like: torch.Tensor, algorithm: str | None = None):
        """`algorithm`: "shared", "prepared" or another of `comm.all_reduce_table`, by default the table's."""
        self.axis = axis
        algorithm = algorithm or (_algorithm(axis, numel, like) if axis.size > 1 and numel else "none")
        self.shared = SharedMemoryBuffer(axis, numel, like.dtype) if algorithm == "shared" else None
        self.local = self.shared.local if self.shared else like.new_zeros(numel)
        self._sum: Callable[[], None] | None = None
        if self.shared:
            self._sum = self.shared.sum
        elif algorithm == "prepared":
            self._sum = _by_mpi(self.local, axis)
        self._entry = axis.transport.traffic.entry(axis.name, "all_reduce")
        self._moved = 2 * (axis.size - 1) * self.local.nbytes // axis.size

    def all_reduce(self) -> torch.Tensor:
        """Replace `local` by the sum."""
        add_up, transport = self._sum, self.axis.transport
        if add_up is None:
            return all_reduce(self.local, self.axis)
        # `time_call` takes a microsecond, a third of the time that MPI takes for a small sum
        alone = transport.watchdog is None and transport.checker is None and transport.trace is None
        if alone and not transport.traffic.timing:
            start = perf_counter()
            _counted(self, add_up)
            self._entry.seconds += perf_counter() - start
        else:
            time_call(self.axis, "all_reduce", _counted, self, add_up)
        return self.local

    def free(self) -> None:
        """Give shared memory back before the grid does: nothing may read `local` any more. Collective."""
        if self.shared:
            self.shared.free()

    def all_reduce_start(self) -> Work[torch.Tensor]:
        """Begin to replace `local` by the sum. In shared memory all is done by `wait()`: nothing would progress before,
        and ranks that sum at once wait for the slowest of them each time."""
        return Work([], None, self.all_reduce) if self.shared else all_reduce_start(self.local, self.axis)


def _counted(buffer: AllReduceBuffer, add_up: Callable[[], None]) -> None:
    """Summed, and in the ledger. The buffer is for `comm.CollectiveChecker`, too."""
    add_up()
    entry = buffer._entry
    entry.calls += 1
    entry.sent += buffer._moved
    entry.received += buffer._moved


def _algorithm(axis: Axis, numel: int, like: torch.Tensor) -> str:
    one_node = path_of(axis, like) is Path.SHARED_MEMORY
    reducer = axis.transport.reducers.get(axis)
    if reducer is not None:
        algorithm = reducer.for_buffer(numel * like.itemsize, one_node)
    else:
        algorithm = DEFAULT.node_buffer if one_node else DEFAULT.buffer
    by_mpi = like.is_cpu and like.dtype in buffers.REDUCED_BY_MPI and numel <= buffers.MAX_COUNT
    return "mpi" if algorithm == "prepared" and not by_mpi else algorithm


def _by_mpi(tensor: torch.Tensor, axis: Axis) -> Callable[[], None]:
    return partial(axis.comm.Allreduce, buffers.in_place(), message(tensor), operation("sum"))
