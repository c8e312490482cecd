"""The 2.5-D product: a plane of q × q ranks, c deep."""

from __future__ import annotations

from hpctrain import comm
from hpctrain.matmul.operands import Direct
from hpctrain.matmul.plane import Plane
from hpctrain.shard import split_sizes


class TwoHalfD(Plane):
    """Cannon's product on each of c planes of q × q ranks; each depth does 1/c of every panel.

    Blocks are those of `Plane`, with their rows further spread over z. The dim that is cut over both x and y is cut
    over z too, where its rows are: depth d multiplies the panels' parts that it holds as rows of B (of C, in `tn`).

        nn   A from rows over z to columns over z; the plane's product; C summed over z, scattered by rows
        nt   A's rows gathered over z; the plane's product; C from columns over z to rows over z
        tn   A from rows over z to columns over z, B's rows gathered over z; the plane's product

    In `sizes = (over x, over y)`, the part of each x is the tuple of its parts over z. `rows` holds the parts over z of
    this x's block of the dim that is rows of the other operands: m in `nn` and `nt`, k in `tn`.

    A product moves mk ((1-1/q)/(qc) + (1-1/c)/(q²c)) + kn (1-1/q)/(qc) + mn (1-1/c)/q² words to every rank.

    Source: Solomonik and Demmel, "Communication-optimal parallel 2.5D matrix multiplication and LU factorization
    algorithms" (2011), algorithm 2, which replicates both operands on every depth. A depth needs no more than its part.
    """

    _kind = Direct

    def cut(self, length):
        over_y = split_sizes(length, self.y.size)
        return tuple(split_sizes(part, self.z.size) for part in over_y), over_y

    def nn(self, a, b, sizes, rows=None):
        plane, widths = self._on_this_depth(sizes)
        z = comm.workspace(self.z)
        a = z.rows_to_columns(a, rows, widths)
        room = z.room(len(a) * b.shape[1], b).view(len(a), b.shape[1])
        self._nn(a, b, plane, plane, out=room)
        return z.reduce_rows(room, rows)

    def nt(self, a, b, sizes, rows=None):
        return self._nt_whole(comm.workspace(self.z).gather(a, rows), b, sizes, rows)

    def tn(self, a, b, sizes, rows=None):
        a = self._columns_held(a, sizes, rows)
        return self._tn_whole(a, comm.workspace(self.z).gather(b, rows), sizes)

    def _nt_whole(self, a, b, sizes, rows):
        """nt, with all rows of a."""
        plane, widths = self._on_this_depth(sizes)
        c = comm.workspace(self.z).columns_to_rows(self._nt(a, b, plane, plane), rows, widths)
        return c.clone() if self.z.size > 1 else c  # not a view of memory that the next call writes to

    def _tn_whole(self, a, b, sizes):
        """tn, with all rows of this depth's columns of a, and all rows of b."""
        plane, _ = self._on_this_depth(sizes)
        return self._tn(a, b, plane, plane)

    def _columns_held(self, a, sizes, rows):
        _, widths = self._on_this_depth(sizes)
        a = comm.workspace(self.z).rows_to_columns(a, rows, widths)
        return a.clone() if self.z.size > 1 else a  # it outlives the next call

    def _on_this_depth(self, sizes):
        """The part of the doubly cut dim that this depth multiplies: its sizes over x, which are those over y too, and
        how this rank's columns are shared out over z."""
        over_x, over_y = sizes
        return tuple(part[self.z.rank] for part in over_x), over_x[self.y.rank]

    def _sizes(self, m, k, n):
        return self.cut(k), self.cut(m)[0][self.x.rank]

    def _forward(self, a, b, sizes):
        return self.nn(a, b, *sizes)

    def _backward(self, needed, a, b, grad, sizes):
        sizes, rows = sizes
        columns = self._columns_held(a, sizes, rows) if needed[1] else None
        grad = comm.workspace(self.z).gather(grad, rows)  # once for both
        grad_b = self._tn_whole(columns, grad, sizes) if needed[1] else None
        return self._nt_whole(grad, b, sizes, rows) if needed[0] else None, grad_b

    def volume(self, m, k, n):
        a, b, c = self._parts(m, k, n)
        return a + b + c

    def volume_backward(self, m, k, n):
        a, b, c = self._parts(m, k, n)
        return 2 * a + 2 * b + c

    def _parts(self, m, k, n):
        """Words that a rank receives to redistribute A, B and C once."""
        q, _, c = self.shape
        along = (1 - 1 / q) / (q * c)
        return m * k * (along + (1 - 1 / c) / (q * q * c)), k * n * along, m * n * (1 - 1 / c) / (q * q)

    def _check_grid(self, x, y, z):
        if x != y:
            raise self._refuse("q × q × c ranks")

    def _turn(self, product, i, j):
        return i + j, self.x.size
