"""The 2.5-D products of layers, between which every matrix has its rows over x and z."""

from __future__ import annotations

from torch import Tensor

from hpctrain import comm
from hpctrain.matmul.plane import Sizes
from hpctrain.matmul.two_half_d import TwoHalfD
from hpctrain.shard import split_sizes


class TwoHalfDRows(TwoHalfD):
    """`nn`, `nt` and `tn` of blocks that are those of `Plane` with their rows further spread over z.

    The dim that is cut over both x and y is cut over z too, where its rows are: depth d multiplies the panels' parts
    that it holds as rows of B (of C, in `tn`).

        nn   A from rows over z to columns over z; the plane's product; C summed over z, scattered by rows
        nt   A's rows gathered over z; the plane's product; C from columns over z to rows over z
        tn   A from rows over z to columns over z, B's rows gathered over z; the plane's product

    In `sizes = (over x, over y)`, the part of each x is the tuple of its parts over z. `rows` holds the parts over z of
    this x's block of the dim that is rows of the other operands: m in `nn` and `nt`, k in `tn`.

    Each moves mk ((1-1/q)/(qc) + (1-1/c)/(q²c)) + kn (1-1/q)/(qc) + mn (1-1/c)/q² elements to every rank, with m, k
    and n those of the `nn` whose forward or backward it is: the part over z of A's columns is what the layout costs.
    """

    def cut(self, length: int, unit: int = 1) -> Sizes:
        over_y = split_sizes(length, self.y.size, unit)
        return tuple(split_sizes(part, self.z.size) for part in over_y), over_y

    def nn(self, a: Tensor, b: Tensor, sizes: Sizes, rows: tuple[int, ...] = ()) -> Tensor:
        depth, widths = self._on_this_depth(sizes)
        z = comm.workspace(self.z, a)
        a = z.rows_to_columns(a, rows, widths)
        summand = z.buffer(len(a) * b.shape[1], b).view(len(a), b.shape[1])
        self._nn(a, b, depth, depth, out=summand)
        return comm.reduce_rows(z, summand, rows)

    def nt(self, a: Tensor, b: Tensor, sizes: Sizes, rows: tuple[int, ...] = ()) -> Tensor:
        depth, widths = self._on_this_depth(sizes)
        z = comm.workspace(self.z, a)
        c = z.columns_to_rows(self._nt(z.gather(a, rows), b, depth, depth), rows, widths)
        return c.clone() if self.z.size > 1 else c  # not a view of memory that the next call writes to

    def tn(self, a: Tensor, b: Tensor, sizes: Sizes, rows: tuple[int, ...] = ()) -> Tensor:
        depth, widths = self._on_this_depth(sizes)
        z = comm.workspace(self.z, a)
        a = z.rows_to_columns(a, rows, widths)
        if z.axis.size > 1:
            a = a.clone()  # it outlives the next call
        return self._tn(a, z.gather(b, rows), depth, depth)

    def _on_this_depth(self, sizes):
        """The part of the doubly cut dim that this depth multiplies: its sizes over x, which are those over y too, and
        how this rank's columns are shared out over z."""
        over_x, over_y = sizes
        if tuple(map(sum, over_x)) != over_y:
            raise ValueError(f"sizes must cut the dim alike over x and over y, got {over_x} and {over_y}")
        return tuple(part[self.z.rank] for part in over_x), over_x[self.y.rank]
