"""How the panels of a result are summed where they belong."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hpctrain import comm, gemm
from hpctrain.matmul.operands import Orders
from hpctrain.matmul.panels import Panel, Scratch, in_place
from hpctrain.matmul.sharded_dim import ShardedDim, summand_buffer


class PanelSums:
    """Adds up panels of the result where they belong, from the partial products of all ranks of an axis, by messages.

    The terms are added in the order of the steps, so that equal input gives equal bits; 16-bit floats are summed in
    float32 and rounded once.

    Args:
        sharded: the dim of the result that is cut into panels, and the axis that it is sharded over.
        side: whether the axis is the first or the second (0 or 1) that the dim is cut over.
        shape: of this rank's block.
        like: gives its dtype and device.
        orders: for each rank of the axis, its panels in the order of its steps.
        scratch: holds what arrives and leaves.
    """

    def __init__(
        self, sharded: ShardedDim, side: int, shape: Sequence[int], like: torch.Tensor, orders: Orders, scratch: Scratch
    ):
        self.axis, self.dim, self.side, self.orders = sharded.axis, sharded.dim, side, orders
        self.order, self._scratch, self._like = orders[self.axis.rank], scratch, like
        wide = comm.accumulation_dtype(like.dtype)
        self._total = torch.zeros(shape, dtype=wide, device=like.device)
        self._arriving: list[list[tuple[Panel, comm.Work[torch.Tensor]]]] = [[], []]
        self._sent: list[comm.Work[None] | None] = [None, None]

    def start(self, step: int) -> None:
        """Be ready for what the others' products of this step add to this rank's block."""
        here, side = self.axis.rank, self.side
        for rank, order in enumerate(self.orders):
            panel = order[step]
            if rank != here and panel.owner[side] == here:
                arriving = self._scratch.take(("sum", step % 2, rank), self._shape(panel), self._like)
                self._arriving[step % 2].append((panel, comm.recv_start(arriving, self.axis, rank)))

    def multiply(self, step: int, a: torch.Tensor, b: torch.Tensor) -> None:
        """Add a @ b to this step's panel, on the rank that it belongs to."""
        panel, turn = self.order[step], step % 2
        owner = panel.owner[self.side]
        if owner == self.axis.rank:
            add_product(self._part(panel), a, b)
            return
        if (sent := self._sent[turn]) is not None:
            sent.wait()
        partial = self._scratch.take(("partial", turn), self._shape(panel), self._like)
        gemm.mm(a, b, out=partial)
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

    def _part(self, panel: Panel) -> torch.Tensor:
        return self._total.narrow(self.dim, panel.start[self.side], panel.width)

    def _shape(self, panel: Panel) -> list[int]:
        shape = list(self._total.shape)
        shape[self.dim] = panel.width
        return shape


class WholeSum:
    """Writes this rank's partial product panel by panel, and sums once all panels are there.

    On an axis of one node it is written where the others will read it.

    Args:
        sharded: how the result is sharded.
        shape: of the partial product.
        dim: of the partial product, which is cut into panels.
        order: this rank's panels in the order of its steps.
    """

    def __init__(self, sharded: ShardedDim, shape: Sequence[int], like: torch.Tensor, dim: int, order: Sequence[Panel]):
        self._sharded, self._dim, self.order = sharded, dim, order
        self.partial = summand_buffer(sharded.axis, shape, like)

    def start(self, step: int) -> None:
        pass

    def multiply(self, step: int, a: torch.Tensor, b: torch.Tensor) -> None:
        panel = self.order[step]
        gemm.mm(a, b, out=self.partial.narrow(self._dim, panel.at, panel.width))

    def collect(self, step: int) -> None:
        pass

    def finish(self) -> torch.Tensor:
        return self._sharded.reduce(self.partial)


Result = PanelSums | WholeSum


def result(sharded: ShardedDim, side: int, width: int, like: torch.Tensor, orders: Orders, scratch: Scratch) -> Result:
    """The result whose sharded dim is cut into panels and whose other dim has this `width`: summed at once on one
    node, else panel by panel."""
    rank = sharded.axis.rank
    whole = in_place(sharded.axis, like)
    length = sum(sharded.sizes) if whole else sharded.sizes[rank]
    shape = (length, width) if sharded.dim == 0 else (width, length)
    if whole:
        return WholeSum(sharded, shape, like, sharded.dim, orders[rank])
    return PanelSums(sharded, side, shape, like, orders, scratch)


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a @ b, where total may be wider than the factors."""
    if total.dtype == a.dtype:
        gemm.addmm(total, a, b, out=total)
    else:
        total += gemm.mm(a, b)
