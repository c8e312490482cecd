"""A flat tensor of which every rank of an axis has a copy, and each rank answers for its own range."""

from __future__ import annotations

from functools import partial

import torch

from hpctrain.comm.buffers import Work, done
from hpctrain.comm.collectives import all_gather_start, reduce_scatter_start
from hpctrain.comm.path import Path, path_of
from hpctrain.comm.shared_memory_buffer import SharedMemoryBuffer
from hpctrain.comm.timing import timed_method
from hpctrain.comm.workspace import workspace
from hpctrain.grid import Axis
from hpctrain.shard import split, split_sizes


class ReplicatedBuffer:
    """`numel` elements on every rank; the ranks' ranges are balanced, in rank order, and cover them.

    On one node the copies lie in shared memory: ranks add up and write in place. Until they have all met again after a
    `wait()` here, such as in another collective, they must not change what the others may still read.

    Attributes: `local`, this rank's copy, initially zero; `counts`, the lengths of the ranges; `own`, this rank's
    range.
    """

    def __init__(self, axis: Axis, numel: int, like: torch.Tensor, dtype: torch.dtype | None = None):
        self.axis, self.counts, self.own = axis, split_sizes(numel, axis.size), split(numel, axis.size, axis.rank)
        dtype = dtype or like.dtype
        shared = path_of(axis, like) is Path.SHARED_MEMORY
        self._shared = SharedMemoryBuffer(axis, numel, dtype) if shared else None
        self.local = self._shared.local if self._shared else like.new_zeros(numel, dtype=dtype)

    @timed_method
    def sum_start(self, comm_dtype: torch.dtype | None = None) -> Work[torch.Tensor]:
        """Begin to replace this rank's range of its copy by the sum of all copies; the rest of it is left.

        The summands travel as `comm_dtype`, by default as they are; 16-bit floats are summed in float32.
        """
        axis, own = self.axis, self.local[self.own]
        if axis.size == 1:
            return done(own)
        if comm_dtype not in (None, self.local.dtype):
            scratch = workspace(axis, self.local)
            summands = scratch.buffer(len(self.local), self.local.new_empty(0, dtype=comm_dtype)).copy_(self.local)
            return done(own.copy_(scratch.reduce(summands, self.counts, self.local.dtype)))
        if self._shared is None:
            return reduce_scatter_start(self.local, axis, self.counts).then(own.copy_)
        return self._shared.window.barrier_start(partial(self._sum_own, self._shared))

    def _sum_own(self, shared: SharedMemoryBuffer) -> torch.Tensor:
        axis, own = self.axis, self.local[self.own]
        shared.sum_own()
        moved = self.local.nbytes - own.nbytes, (axis.size - 1) * own.nbytes
        axis.transport.traffic.add(axis.name, "reduce_scatter", *moved)
        return own

    @timed_method
    def spread_start(self, comm_dtype: torch.dtype | None = None) -> Work[torch.Tensor]:
        """Begin to write every rank's range to all copies. They travel, and are rounded to, `comm_dtype`."""
        axis, own = self.axis, self.local[self.own]
        if axis.size == 1:
            return done(self.local)
        if comm_dtype not in (None, self.local.dtype):
            return done(self.local.copy_(workspace(axis, own).gather(own.to(comm_dtype), self.counts)))
        if self._shared is None:
            return all_gather_start(own, axis, self.counts, out=self.local)
        for rank, copy in enumerate(self._shared.all):
            if rank != axis.rank:
                copy[self.own] = own
        moved = (axis.size - 1) * own.nbytes, self.local.nbytes - own.nbytes
        axis.transport.traffic.add(axis.name, "all_gather", *moved)
        return self._shared.window.barrier_start(lambda: self.local)
