"""Which tokens of an activation each rank of the tensor axis has where it is divided by tokens."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from hpctrain.comm import functional
from hpctrain.convert import boundary
from hpctrain.grid import Axis
from hpctrain.layout import Layout

OVER = ("z", "x", "y")  # outermost first, so that the ranks of a z block have neighbours


@dataclass(frozen=True)
class TokenRows:
    """Rows of a matrix of `count` rows over the ranks of a tensor axis.

    The first two operations take and give whole matrices as code outside of divided units has them, the same on every
    rank; the others, as inside.
    """

    axis: Axis
    count: int

    @property
    def counts(self) -> tuple[int, ...]:
        """Rows by rank."""
        return tuple(stop - start for start, stop in self._ranges)

    @property
    def start(self) -> int:
        """The first row of this rank."""
        return self._ranges[self.axis.rank][0]

    @property
    def in_order(self) -> bool:
        """Whether the ranks' rows lie one after another by rank."""
        return self._ranges == tuple(sorted(self._ranges))

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's. Adjoint: `gather`."""
        return boundary.take(self._by_rank(whole), self.axis, self.counts, 0)

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """All. Adjoint: `take`."""
        return self._in_order(boundary.gather(rows, self.axis, self.counts, 0))

    def enter(self, rows: torch.Tensor) -> torch.Tensor:
        """All, for each rank to work on its part with. Adjoint: `leave`."""
        return self._in_order(functional.all_gather(rows, self.axis, self.counts))

    def leave(self, summand: torch.Tensor) -> torch.Tensor:
        """This rank's of the sum of all ranks' matrices. Adjoint: `enter`."""
        return functional.reduce_scatter(self._by_rank(summand), self.axis, self.counts)

    @property
    def _ranges(self):
        return _ranges(self.count, self.axis.x.size, self.axis.y.size, self.axis.z.size)

    def _by_rank(self, x):
        return x if self.in_order else torch.cat([x[start:stop] for start, stop in self._ranges])

    def _in_order(self, x):
        if self.in_order:
            return x
        parts, ranges = x.split(self.counts), self._ranges
        return torch.cat([parts[rank] for rank in sorted(range(len(ranges)), key=lambda rank: ranges[rank])])


@functools.lru_cache(maxsize=256)
def _ranges(count, x, y, z) -> tuple[tuple[int, int], ...]:
    """
    >>> _ranges(7, 2, 1, 2)
    ((0, 2), (4, 6), (2, 4), (6, 7))
    """
    layout, sizes = Layout.of((count,), {0: OVER}), {"x": x, "y": y, "z": z}
    places = ({"x": i, "y": j, "z": k} for i in range(x) for j in range(y) for k in range(z))
    return tuple((part.start, part.stop) for place in places for part in layout.slices(sizes, place))
