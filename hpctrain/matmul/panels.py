"""Panels: the steps of a product over two axes, and how operands and results travel in them.

A dim that is cut over two axes is walked in panels, each of which is whole on one rank of either axis. At every step a
rank is brought the next panel's operands while it multiplies this one's, and hands partial products to the rank they
belong to. Where an axis lies on one node there is nothing to bring: a panel is read in place, in shared memory.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import torch

from hpctrain import comm
from hpctrain.comm.buffers import REDUCED_HERE


class Panel(NamedTuple):
    """Places [at, at + width) of a dim; on axis a of the two, rank owner[a] holds them, from its own place start[a]."""

    at: int
    width: int
    owner: tuple[int, int]
    start: tuple[int, int]


@functools.lru_cache(1024)
def panels(over_first: tuple[int, ...], over_second: tuple[int, ...]) -> tuple[Panel, ...]:
    """The common refinement of two partitions of a dim, without empty panels.

    >>> [tuple(panel) for panel in panels((2, 4), (3, 3))]
    [(0, 2, (0, 0), (0, 0)), (2, 1, (1, 0), (0, 2)), (3, 3, (1, 1), (1, 0))]
    """
    cuts = [list(itertools.accumulate(sizes, initial=0)) for sizes in (over_first, over_second)]
    if cuts[0][-1] != cuts[1][-1]:
        raise ValueError(f"sizes must be two partitions of one dim, got {over_first} and {over_second}")
    found = []
    for at, stop in itertools.pairwise(sorted({*cuts[0], *cuts[1]})):
        # of several ranks that begin here, all but the last hold nothing
        owner = tuple(max(r for r in range(len(cut) - 1) if cut[r] <= at) for cut in cuts)
        found.append(Panel(at, stop - at, owner, tuple(at - cut[r] for cut, r in zip(cuts, owner))))
    return tuple(found)


@functools.lru_cache(4096)
def turned(steps: tuple, turn: int, turns: int) -> tuple:
    """The steps, begun `turn` of `turns` equal parts of the way.

    >>> turned(("a", "b", "c", "d"), 1, 2)
    ('c', 'd', 'a', 'b')
    """
    first = turn % turns * len(steps) // turns
    return (*steps[first:], *steps[:first])


class Scratch:
    """Memory that every call uses again, by name."""

    def __init__(self):
        self._flat: dict = {}

    def take(self, name, shape, like: torch.Tensor) -> torch.Tensor:
        """Uninitialised memory, of the dtype and device of `like`."""
        key = name, like.dtype, like.device
        flat, numel = self._flat.get(key), shape[0] * shape[1]
        if flat is None or flat.numel() < numel:
            flat = self._flat[key] = like.new_empty(numel)
        return flat[:numel].view(shape)


# Operands --------------------------------------------------------------------------------------------------------


class Held:
    """An operand that this rank reads whole: nothing travels."""

    def __init__(self, whole: torch.Tensor, dim: int, order):
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
        axis: along which the operand's panels are spread.
        side: whether the axis is the first or the second (0 or 1) that the dim is cut over.
        block: this rank's block, whose dim `dim` is the one that is cut into panels.
        orders: for each rank of the axis, its panels in the order of its steps.
        scratch: holds two panels.
    """

    def __init__(self, axis, side: int, block: torch.Tensor, dim: int, orders: list, scratch: Scratch):
        self.axis, self.side, self.block, self.dim, self.orders = axis, side, block, dim, orders
        self.order, self._scratch = orders[axis.rank], scratch
        self._coming = [None, None]
        self._sent = []

    def start(self, step: int) -> None:
        """Begin to bring the panel of this step; the one two steps before is lost."""
        here, side = self.axis.rank, self.side
        owner = self.order[step].owner[side]
        if owner != here:
            self._coming[step % 2] = comm.recv_start(self._room(step), self.axis, owner)
        for rank, order in enumerate(self.orders):
            if rank != here and order[step].owner[side] == here:
                self._sent.append(comm.send_start(self._part(order[step]), self.axis, rank))

    def take(self, step: int) -> torch.Tensor:
        """The panel of this step."""
        panel = self.order[step]
        if panel.owner[self.side] == self.axis.rank:
            return self._part(panel)
        return self._coming[step % 2].wait()

    def finish(self) -> None:
        for work in self._sent:
            work.wait()

    def _part(self, panel):
        return self.block.narrow(self.dim, panel.start[self.side], panel.width)

    def _room(self, step):
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
            self._coming[step % 2] = comm.broadcast_start(self._room(step), self.axis, owner)


def operand(kind: type, axis, side: int, block, dim: int, sizes, orders: list, scratch: Scratch):
    """The operand of which this rank holds `block`: read in place where the axis is on one node, else `kind`."""
    if not in_place(axis, block):
        return kind(axis, side, block, dim, orders, scratch)
    workspace = comm.workspace(axis)
    whole = workspace.gather_columns(block, sizes) if dim else workspace.gather(block, sizes)
    return Held(whole, dim, orders[axis.rank])


# Results ---------------------------------------------------------------------------------------------------------


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


def in_place(axis, block: torch.Tensor) -> bool:
    """Whether the axis's blocks are within this rank's reach."""
    return axis.size == 1 or (axis.one_node and block.is_cpu)


# Products --------------------------------------------------------------------------------------------------------


def contract(left, right, shape, transpose: bool = False, out=None) -> torch.Tensor:
    """The product of two operands whose panels meet in the dim that is summed over; of left's transpose if asked."""
    if isinstance(left, Held) and isinstance(right, Held):
        return torch.mm(left.whole.t() if transpose else left.whole, right.whole, out=out)
    like = right.block if isinstance(left, Held) else left.block
    wide = torch.float32 if like.dtype in REDUCED_HERE else like.dtype
    total = torch.zeros(shape, dtype=wide, device=like.device)
    steps = len(left.order)
    for step in range(-1, steps):
        if step + 1 < steps:
            left.start(step + 1)
            right.start(step + 1)
        if step >= 0:
            a = left.take(step)
            add_product(total, a.t() if transpose else a, right.take(step))
    left.finish()
    right.finish()
    return total.to(like.dtype) if out is None else out.copy_(total)


def spread(source, target, factors) -> torch.Tensor:
    """Products with each panel of `source`, summed into `target`; `factors` makes the two factors from the panel."""
    if isinstance(source, Held) and isinstance(target, SharedResult):
        torch.mm(*factors(source.whole), out=target.room)
        return target.finish()
    steps = len(source.order)
    for step in range(-1, steps):
        if step + 1 < steps:
            source.start(step + 1)
        if step >= 0:
            target.start(step)
            target.multiply(step, *factors(source.take(step)))
        if step >= 1:
            target.collect(step - 1)
    if steps:
        target.collect(steps - 1)
    source.finish()
    return target.finish()


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a @ b, where total may be wider than the factors."""
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, out=total)
    else:
        total += torch.mm(a, b)
