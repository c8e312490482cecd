"""Halo exchange: rows of a dim that is spread over an axis go from where they are local to where they are needed.

Source: the generalised halo exchange of Hewett and Grady, "A linear algebraic approach to model parallelism in deep
learning" (2020), section 4; here any rank may need rows of any other, not of its neighbours alone, as it must where
blocks are thinner than a halo or empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from hpctrain.comm.collectives import all_to_all
from hpctrain.comm.timing import timed_method
from hpctrain.grid import Axis


@dataclass(frozen=True)
class Halo:
    """Who holds and who needs which rows; the same on all ranks of the axis.

    Attributes:
        axis: over which the dim is spread.
        local: the rows of each rank, in rank order: one after the other from 0 to the length of the dim.
        needed: the rows each rank is to have. They may overlap, leave rows out, and reach before 0 or beyond the
            length.
        dim: of the tensor.
        fill: value of the rows outside the dim.
    """

    axis: Axis
    local: tuple[slice, ...]
    needed: tuple[slice, ...]
    dim: int = 2
    fill: float = 0.0

    @timed_method
    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's needed rows. Receives those that others hold, once each."""
        rank = self.axis.rank
        local, needed = self.local[rank], self.needed[rank]
        if self.axis.size == 1 and local == needed:
            return x.view_as(x)
        to = [_common(local, other) for other in self.needed]
        of = [_common(other, needed) for other in self.local]
        out = _resized(x, self.dim, needed)
        self._part(out, needed.start, slice(needed.start, min(needed.stop, 0))).fill_(self.fill)
        length = self.local[-1].stop
        self._part(out, needed.start, slice(max(needed.start, length), needed.stop)).fill_(self.fill)
        self._part(out, needed.start, of[rank]).copy_(self._part(x, local.start, to[rank]))
        for part, rows in self._swap(x, local.start, to, of):
            self._part(out, needed.start, part).copy_(rows)
        return out

    @timed_method
    def adjoint(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of the local rows: the sum over all ranks that needed them, in a fixed order."""
        rank = self.axis.rank
        local, needed = self.local[rank], self.needed[rank]
        if self.axis.size == 1 and local == needed:
            return grad.view_as(grad)
        to = [_common(other, needed) for other in self.local]
        of = [_common(local, other) for other in self.needed]
        out = _resized(grad, self.dim, local).zero_()
        self._part(out, local.start, of[rank]).copy_(self._part(grad, needed.start, to[rank]))
        for part, rows in self._swap(grad, needed.start, to, of):
            self._part(out, local.start, part).add_(rows)
        return out

    def _swap(
        self, x: torch.Tensor, start: int, to: Sequence[slice], of: Sequence[slice]
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Send each rank r the rows to[r] of x, whose first is `start`; the rows of[r] received from each, in order."""
        here = self.axis.rank
        row = x.shape[: self.dim].numel() * x.shape[self.dim + 1 :].numel()
        sizes = [[0 if r == here else row * _length(part) for r, part in enumerate(parts)] for parts in (to, of)]
        leaving = [self._part(x, start, part).reshape(-1) for size, part in zip(sizes[0], to) if size]
        arrived = all_to_all(torch.cat(leaving) if leaving else x.new_empty(0), self.axis, *sizes)
        for part, flat in zip(of, arrived.split(sizes[1])):
            if flat.numel():
                yield part, flat.view(*x.shape[: self.dim], _length(part), *x.shape[self.dim + 1 :])

    def _part(self, x: torch.Tensor, start: int, part: slice) -> torch.Tensor:
        length = _length(part)
        return x.narrow(self.dim, part.start - start if length else 0, length)


def _common(a: slice, b: slice) -> slice:
    return slice(max(a.start, b.start), min(a.stop, b.stop))


def _length(part: slice) -> int:
    return max(0, part.stop - part.start)


def _resized(x: torch.Tensor, dim: int, rows: slice) -> torch.Tensor:
    return x.new_empty(*x.shape[:dim], _length(rows), *x.shape[dim + 1 :])
