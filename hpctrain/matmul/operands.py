"""How the panels of an operand reach the ranks that multiply them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hpctrain import comm
from hpctrain.matmul.panels import Panel, Scratch, in_place
from hpctrain.matmul.sharded_dim import ShardedDim

Orders = list[tuple[Panel, ...]]  # for each rank of an axis, its panels in the order of its steps


class Gathered:
    """An operand that was gathered: nothing travels. `order`, of panels, is needed where those of others do."""

    def __init__(self, whole: torch.Tensor, dim: int, order: Sequence[Panel] = ()):
        self.whole, self.dim, self.order = whole, dim, order

    def start(self, step: int) -> None:
        pass

    def take(self, step: int) -> torch.Tensor:
        return self.whole.narrow(self.dim, self.order[step].at, self.order[step].width)

    def finish(self) -> None:
        pass


class Direct:
    """Each panel is sent straight from its owner to every rank whose step needs it.

    Where the ranks take the panels in different turns, each rank sends to one other at a time, as in Cannon's product.

    Args:
        sharded: the dim of the operand that is cut into panels, and the axis that it is sharded over.
        side: whether the axis is the first or the second (0 or 1) that the dim is cut over.
        block: this rank's block.
        orders: for each rank of the axis, its panels in the order of its steps.
        scratch: holds two panels.
    """

    def __init__(self, sharded: ShardedDim, side: int, block: torch.Tensor, orders: Orders, scratch: Scratch):
        self.axis, self.dim, self.side, self.block, self.orders = sharded.axis, sharded.dim, side, block, orders
        self.order, self._scratch = orders[self.axis.rank], scratch
        self._coming: list[comm.Work[torch.Tensor] | None] = [None, None]
        self._sent: list[comm.Work[None] | comm.Work[torch.Tensor]] = []

    def start(self, step: int) -> None:
        """Begin to bring the panel of this step; the one two steps before is lost."""
        here, side = self.axis.rank, self.side
        owner = self.order[step].owner[side]
        if owner != here:
            self._coming[step % 2] = comm.recv_start(self._buffer(step), self.axis, owner)
        for rank, order in enumerate(self.orders):
            if rank != here and order[step].owner[side] == here:
                self._sent.append(comm.send_start(self._part(order[step]), self.axis, rank))

    def take(self, step: int) -> torch.Tensor:
        """The panel of this step."""
        panel = self.order[step]
        if panel.owner[self.side] == self.axis.rank:
            return self._part(panel)
        coming = self._coming[step % 2]
        assert coming is not None  # it was started
        return coming.wait()

    def finish(self) -> None:
        for work in self._sent:
            work.wait()

    def _part(self, panel: Panel) -> torch.Tensor:
        return self.block.narrow(self.dim, panel.start[self.side], panel.width)

    def _buffer(self, step: int) -> torch.Tensor:
        shape = list(self.block.shape)
        shape[self.dim] = self.order[step].width
        return self._scratch.take(("operand", self.axis.name, step % 2), shape, self.block)


class Broadcast(Direct):
    """Each panel is broadcast along the axis, whose ranks take the panels in one order, as in SUMMA."""

    def start(self, step: int) -> None:
        panel = self.order[step]
        owner = panel.owner[self.side]
        if owner == self.axis.rank:
            self._sent.append(comm.broadcast_start(self._part(panel).contiguous(), self.axis, owner))
        else:
            self._coming[step % 2] = comm.broadcast_start(self._buffer(step), self.axis, owner)


Operand = Gathered | Direct


def operand(
    kind: type[Direct], sharded: ShardedDim, side: int, block: torch.Tensor, orders: Orders, scratch: Scratch
) -> Operand:
    """The operand of which this rank holds `block`: read in place where the axis is on one node, else `kind`."""
    if in_place(sharded.axis, block):
        return Gathered(sharded.gather(block), sharded.dim, orders[sharded.axis.rank])
    return kind(sharded, side, block, orders, scratch)
