"""How the panels of a result are summed where they belong."""

from __future__ import annotations

import torch

from hpctrain import comm
from hpctrain.comm.buffers import REDUCED_HERE
from hpctrain.matmul.panels import Scratch, in_place


class Result:
    """Adds up panels of the result where they belong, from the partial products of all ranks of an axis, by messages.

    The terms are added in the order of the steps, so that equal input gives equal bits; 16-bit floats are summed in
    float32 and rounded once. Arguments as for `Direct`; `shape` is that of this rank's block, `like` gives its dtype.
    """

    def __init__(self, axis, side: int, shape: tuple[int, int], like, dim: int, orders: list, scratch: Scratch):
        self.axis, self.side, self.dim, self.orders = axis, side, dim, orders
        self.order, self._scratch, self._like = orders[axis.rank], scratch, like
        wide = torch.float32 if like.dtype in REDUCED_HERE else like.dtype
        self._total = torch.zeros(shape, dtype=wide, device=like.device)
        self._arriving = [[], []]
        self._sent = [None, None]

    def start(self, step: int) -> None:
        """Be ready for what the others' products of this step add to this rank's block."""
        here, side = self.axis.rank, self.side
        for rank, order in enumerate(self.orders):
            panel = order[step]
            if rank != here and panel.owner[side] == here:
                room = self._scratch.take(("sum", step % 2, rank), self._shape(panel), self._like)
                self._arriving[step % 2].append((panel, comm.recv_start(room, self.axis, rank)))

    def multiply(self, step: int, a: torch.Tensor, b: torch.Tensor) -> None:
        """Add a @ b to this step's panel, on the rank that it belongs to."""
        panel, turn = self.order[step], step % 2
        owner = panel.owner[self.side]
        if owner == self.axis.rank:
            add_product(self._part(panel), a, b)
            return
        if self._sent[turn] is not None:
            self._sent[turn].wait()
        partial = self._scratch.take(("partial", turn), self._shape(panel), self._like)
        torch.mm(a, b, out=partial)
        self._sent[turn] = comm.send_start(partial, self.axis, owner)

    def collect(self, step: int) -> None:
        """Add what arrives for this step."""
        for panel, work in self._arriving[step % 2]:
            self._part(panel).add_(work.wait())
        self._arriving[step % 2].clear()

    def finish(self) -> torch.Tensor:
        for work in self._sent:
            if work is not None:
                work.wait()
        return self._total.to(self._like.dtype)

    def _part(self, panel):
        return self._total.narrow(self.dim, panel.start[self.side], panel.width)

    def _shape(self, panel):
        shape = list(self._total.shape)
        shape[self.dim] = panel.width
        return shape


class SharedResult:
    """The same on an axis of one node: the partial product is written where the others will read it."""

    def __init__(self, axis, shape: tuple[int, int], like: torch.Tensor, dim: int, sizes, order):
        self._workspace, self._dim, self._sizes, self.order = comm.workspace(axis), dim, sizes, order
        shape = list(shape)
        shape[dim] = sum(sizes)
        self.room = self._workspace.room(shape[0] * shape[1], like).view(shape)

    def start(self, step: int) -> None:
        pass

    def multiply(self, step: int, a: torch.Tensor, b: torch.Tensor) -> None:
        panel = self.order[step]
        torch.mm(a, b, out=self.room.narrow(self._dim, panel.at, panel.width))

    def collect(self, step: int) -> None:
        pass

    def finish(self) -> torch.Tensor:
        reduce = self._workspace.reduce_columns if self._dim else self._workspace.reduce_rows
        return reduce(self.room, self._sizes)


def result(axis, side: int, shape, like, dim: int, sizes, orders: list, scratch: Scratch):
    """The result of which this rank is to hold a block of `shape`: summed in place on one node, else by messages."""
    if in_place(axis, like):
        return SharedResult(axis, shape, like, dim, sizes, orders[axis.rank])
    return Result(axis, side, shape, like, dim, orders, scratch)


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a @ b, where total may be wider than the factors."""
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, out=total)
    else:
        total += torch.mm(a, b)
