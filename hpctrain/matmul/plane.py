"""Products on a plane of ranks: Cannon's and SUMMA.

Every block is cut over x by rows and over y by columns. Three products keep to that layout, so that a backward, or a
layer that multiplies by a transposed weight, forms no transpose and re-arranges nothing:

    nn   C(m/x, n/y) = A(m/x, k/y) B(k/x, n/y)       A's columns travel along y, B's rows along x
    nt   C(m/x, n/y) = A(m/x, k/y) B(n/x, k/y)ᵀ      B's rows travel along x, partial products along y
    tn   C(m/x, n/y) = A(k/x, m/y)ᵀ B(k/x, n/y)      A's columns travel along y, partial products along x

In each, one dim is cut over both axes: k, n and m in turn. `sizes` holds its parts over x and its parts over y; it may
be cut anywhere. The other dims are what the blocks say, and may be cut anywhere too.
"""

from __future__ import annotations

from torch import Tensor

from hpctrain.matmul.base import Layouts, Matmul
from hpctrain.matmul.operands import Broadcast, Direct, operand
from hpctrain.matmul.panels import panels, rotated
from hpctrain.matmul.pipelined_loops import contract, map_panels
from hpctrain.matmul.results import result
from hpctrain.matmul.sharded_dim import Columns, Rows
from hpctrain.shard import split_sizes

Sizes = tuple[tuple[int, ...] | tuple[tuple[int, ...], ...], tuple[int, ...]]
"""Of a dim that is cut over both axes: its parts over x (in `TwoHalfDRows`, the parts over z of each), and over y."""


class Plane(Matmul):
    """What Cannon's product and SUMMA have in common.

    Block products take, and `cut` gives for a dim in balanced parts, `sizes = (parts over x, parts over y)`. Each
    of the three moves mk (y-1)/(xy) + kn (x-1)/(xy) elements to every rank, with m, k and n those of the C = A B
    whose forward or backward it is. Here C stays; on the same ranks Agarwal's product, where A stays, moves
    kn (x-1)/(xy) + mn (y-1)/(xy): less, where k > n.
    """

    layouts: Layouts = ((("x",), ("y",)),) * 3
    _kind: type[Direct]  # how operands travel

    def cut(self, length: int, unit: int = 1) -> Sizes:
        """The balanced `sizes` of a dim that is cut only at multiples of `unit`."""
        return split_sizes(length, self.x.size, unit), split_sizes(length, self.y.size, unit)

    def nn(self, a: Tensor, b: Tensor, sizes: Sizes, rows: tuple[int, ...] = ()) -> Tensor:
        """C(m/x, n/y) = A(m/x, k/y) B(k/x, n/y); `sizes` of k. `rows` is for `TwoHalfDRows`."""
        return self._nn(a, b, *sizes)

    def nt(self, a: Tensor, b: Tensor, sizes: Sizes, rows: tuple[int, ...] = ()) -> Tensor:
        """C(m/x, n/y) = A(m/x, k/y) B(n/x, k/y)ᵀ; `sizes` of n. `rows` is for `TwoHalfDRows`."""
        return self._nt(a, b, *sizes)

    def tn(self, a: Tensor, b: Tensor, sizes: Sizes, rows: tuple[int, ...] = ()) -> Tensor:
        """C(m/x, n/y) = A(k/x, m/y)ᵀ B(k/x, n/y); `sizes` of m. `rows` is for `TwoHalfDRows`."""
        return self._tn(a, b, *sizes)

    def _nn(self, a, b, over_x, over_y, out=None):
        left = self._columns("nn", a, over_x, over_y)
        right = self._rows("nn", b, over_x, over_y)
        return contract(left, right, (len(a), b.shape[1]), out=out)

    def _nt(self, a, b, over_x, over_y):
        orders = self._orders("nt", self.y, over_x, over_y)
        right = self._rows("nt", b, over_x, over_y)
        c = result(Columns(self.y, over_y), 1, len(a), a, orders, self._scratch)
        return map_panels(right, c, lambda panel: (a, panel.t()))

    def _tn(self, a, b, over_x, over_y):
        orders = self._orders("tn", self.x, over_x, over_y)
        left = self._columns("tn", a, over_x, over_y)
        c = result(Rows(self.x, over_x), 0, b.shape[1], b, orders, self._scratch)
        return map_panels(left, c, lambda panel: (panel.t(), b))

    def _columns(self, product, a, over_x, over_y):
        """A, whose columns are spread over y."""
        orders = self._orders(product, self.y, over_x, over_y)
        return operand(self._kind, Columns(self.y, over_y), 1, a, orders, self._scratch)

    def _rows(self, product, b, over_x, over_y):
        """B, whose rows are spread over x."""
        orders = self._orders(product, self.x, over_x, over_y)
        return operand(self._kind, Rows(self.x, over_x), 0, b, orders, self._scratch)

    def _turn(self, product: str, i: int, j: int) -> tuple[int, int]:
        """Where the rank at (i, j) begins among its panels: so many of so many parts of the way."""
        raise NotImplementedError

    def _orders(self, product, axis, over_x, over_y):
        """For each rank of the axis, its panels in the order of its steps."""
        i, j, _ = self._place
        steps = panels(over_x, over_y)
        places = [(rank, j) if axis is self.x else (i, rank) for rank in range(axis.size)]
        return [rotated(steps, *self._turn(product, *place)) for place in places]

    def volume(self, m: int, k: int, n: int) -> float:
        x, y, _ = self.shape
        return (m * k * (y - 1) + k * n * (x - 1)) / (x * y)

    def volume_backward(self, m: int, k: int, n: int) -> float:
        return 2 * self.volume(m, k, n)

    def _sizes(self, m, k, n):
        return self.cut(k)

    def _forward(self, a, b, sizes):
        return self.nn(a, b, sizes)

    def _backward(self, needed, a, b, grad, sizes):
        return (
            self.nt(grad, b, sizes) if needed[0] else None,
            self.tn(a, grad, sizes) if needed[1] else None,
        )


class Cannon(Plane):
    """Cannon's product on q × q ranks.

    At step t, rank (i, j) multiplies A(i, l) B(l, j) with l = i + j + t mod q: every rank is at another panel, so that
    each sends one block and receives one, which travel while the ranks multiply. A block is received from the rank that
    holds it, where Cannon's mesh passed it from neighbour to neighbour: this needs no skewing beforehand, and a rank
    receives (q-1)/q² (mk + kn) elements instead of (q²-1)/q³ (mk + kn).

    Source: Cannon, "A cellular computer to implement the Kalman filter algorithm" (1969), chapter 3.
    """

    _kind = Direct

    def _check_grid(self, x, y, z):
        if x != y or z != 1:
            raise self._refuse("q × q × 1 ranks")

    def _turn(self, product, i, j):
        return i + j, self.x.size


class Summa(Plane):
    """SUMMA on any x × y ranks: panels are broadcast, one ahead of the product.

    Source: van de Geijn and Watts, "SUMMA: scalable universal matrix multiplication algorithm" (1997); its forms with a
    transposed operand, section 5. Where partial products travel, each row or column of ranks begins at another panel,
    so that they do not all reach one rank at once.
    """

    _kind = Broadcast

    def _check_grid(self, x, y, z):
        if z != 1:
            raise self._refuse("x × y × 1 ranks")

    def _turn(self, product, i, j):
        # the ranks that share a broadcast take the panels in one order
        return {"nn": (0, 1), "nt": (j, self.y.size), "tn": (i, self.x.size)}[product]
