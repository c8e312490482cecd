"""A flat tensor of which each rank of an axis holds its range, and sees the whole when it asks for it."""

from __future__ import annotations

import torch

from hpctrain.comm.buffers import Work, done
from hpctrain.comm.collectives import all_gather_start
from hpctrain.comm.path import Path, path_of
from hpctrain.comm.timing import timed_method
from hpctrain.comm.windows import Window
from hpctrain.grid import Axis
from hpctrain.shard import split, split_sizes


class ShardedBuffer:
    """`numel` elements; the ranks' ranges are balanced, in rank order, and cover them.

    On one node there is one tensor for all, in shared memory, where each rank has allocated its range: the others'
    are read in place. Otherwise the whole has memory from `gather_start` to `release`.

    Attributes: `whole`, whose address may change from one gather to the next, so that views of it must share its
    storage; `own`, this rank's range, and `local`, its elements, which are always there.
    """

    def __init__(self, axis: Axis, numel: int, like: torch.Tensor, dtype: torch.dtype | None = None):
        self.axis, self.counts, self.own = axis, split_sizes(numel, axis.size), split(numel, axis.size, axis.rank)
        dtype = dtype or like.dtype
        self._window: Window | None = None
        if numel and path_of(axis, like) is Path.SHARED_MEMORY:
            self._window = Window(axis, self.counts[axis.rank] * dtype.itemsize)
            self.whole = self._window.whole[: numel * dtype.itemsize].view(dtype)
            self.local = self.whole[self.own]
        else:
            self.whole = like.new_empty(numel, dtype=dtype)
            self.local = self.whole if axis.size == 1 else self.whole[self.own].clone()
        self._nbytes = self.whole.untyped_storage().nbytes()

    @timed_method
    def gather_start(self) -> Work[torch.Tensor]:
        """Begin to bring everybody's elements to `whole`."""
        axis, local = self.axis, self.local
        if axis.size == 1:
            return done(self.whole)
        if self._window is None:
            self.whole.untyped_storage().resize_(self._nbytes)
            return all_gather_start(local, axis, self.counts, out=self.whole)
        moved = (axis.size - 1) * local.nbytes, self.whole.nbytes - local.nbytes
        axis.transport.traffic.add(axis.name, "all_gather", *moved)
        return done(self.whole)

    def release(self) -> None:
        """`whole` is not needed until the next gather."""
        if self.axis.size > 1 and self._window is None:
            self.whole.untyped_storage().resize_(0)

    def changed_start(self) -> Work[None]:
        """This rank's elements are changed; what `gather_start` brings after `wait()` has everybody's changes."""
        return done() if self._window is None else self._window.barrier_start(lambda: None)
