"""A tensor that is summed over an axis again and again."""

from __future__ import annotations

import torch

from hpctrain.comm.buffers import Work
from hpctrain.comm.collectives import all_reduce, all_reduce_start
from hpctrain.comm.windows import Shared


class Summed:
    """A flat tensor to fill on every rank of an axis, then replaced by the sum over all. Its creation is collective.

    On one node it lies in memory that all ranks share, where a sum needs no messages, unless another algorithm was
    chosen for the axis.

    Attributes: `mine`, this rank's tensor, initially zero.
    """

    def __init__(self, axis, numel: int, like: torch.Tensor):
        self.axis = axis
        shared = axis.size > 1 and axis.one_node and like.is_cpu
        if shared and axis.reducer is not None:
            shared = axis.reducer.in_windows(numel * like.itemsize)
        self.shared = Shared(axis, numel, like.dtype) if shared else None
        self.mine = self.shared.mine if shared else like.new_zeros(numel)

    def all_reduce(self) -> torch.Tensor:
        """Replace `mine` by the sum."""
        if self.shared is None:
            return all_reduce(self.mine, self.axis)
        self.shared.all_reduce()
        return self.mine

    def all_reduce_start(self) -> Work:
        """Begin to replace `mine` by the sum. In shared memory all is done by `wait()`: nothing would progress before,
        and ranks that sum at once wait for the slowest of them each time."""
        return Work([], None, self.all_reduce) if self.shared else all_reduce_start(self.mine, self.axis)
