"""A flat tensor of which every rank of an axis has a copy, and each rank answers for its own range."""

from __future__ import annotations

import torch

from hpctrain.comm.buffers import Work, done
from hpctrain.comm.collectives import all_gather_start, reduce_scatter_start
from hpctrain.comm.shared import Shared
from hpctrain.comm.timing import timed_method
from hpctrain.comm.workspaces import workspace
from hpctrain.shard import split, split_sizes


class Copies:
    """`numel` elements on every rank; the ranks' ranges are balanced, in rank order, and cover them.

    On one node the copies lie in shared memory: ranks add up and write in place. Until they have all met again after a
    `wait()` here, such as in another collective, they must not change what the others may still read.

    Attributes: `mine`, this rank's copy, initially zero; `counts`, the lengths of the ranges; `own`, this rank's range.
    """

    def __init__(self, axis, numel: int, like: torch.Tensor, dtype: torch.dtype | None = None):
        self.axis, self.counts, self.own = axis, split_sizes(numel, axis.size), split(numel, axis.size, axis.rank)
        dtype = dtype or like.dtype
        shared = axis.size > 1 and axis.one_node and like.is_cpu
        self._shared = Shared(axis, numel, dtype) if shared else None
        self.mine = self._shared.mine if shared else like.new_zeros(numel, dtype=dtype)

    @timed_method
    def sum_start(self, wire: torch.dtype | None = None) -> Work:
        """Begin to replace this rank's range of its copy by the sum of all copies; the rest of it is left.

        The summands travel as `wire`, by default as they are; 16-bit floats are summed in float32.
        """
        axis, own = self.axis, self.mine[self.own]
        if axis.size == 1:
            return done(own)
        if wire not in (None, self.mine.dtype):
            space = workspace(axis)
            room = space.room(len(self.mine), self.mine.new_empty(0, dtype=wire)).copy_(self.mine)
            return done(own.copy_(space.reduce(room, self.counts, self.mine.dtype)))
        if self._shared is None:
            return reduce_scatter_start(self.mine, axis, self.counts).then(own.copy_)
        return self._shared.window.barrier_start(self._sum_own)

    def _sum_own(self):
        axis, own = self.axis, self.mine[self.own]
        self._shared.sum_own()
        moved = self.mine.nbytes - own.nbytes, (axis.size - 1) * own.nbytes
        axis.wire.traffic.add(axis.name, "reduce_scatter", *moved)
        return own

    @timed_method
    def spread_start(self, wire: torch.dtype | None = None) -> Work:
        """Begin to write every rank's range to all copies. They travel, and are rounded to, `wire`."""
        axis, own = self.axis, self.mine[self.own]
        if axis.size == 1:
            return done(self.mine)
        if wire not in (None, self.mine.dtype):
            return done(self.mine.copy_(workspace(axis).gather(own.to(wire), self.counts)))
        if self._shared is None:
            return all_gather_start(own, axis, self.counts, out=self.mine)
        for rank, copy in enumerate(self._shared.all):
            if rank != axis.rank:
                copy[self.own] = own
        moved = (axis.size - 1) * own.nbytes, self.mine.nbytes - own.nbytes
        axis.wire.traffic.add(axis.name, "all_gather", *moved)
        return self._shared.window.barrier_start(lambda: self.mine)
