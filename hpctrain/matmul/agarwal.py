"""Agarwal's 3-D product."""

from __future__ import annotations

import torch

from hpctrain import comm
from hpctrain.matmul.base import Matmul
from hpctrain.matmul.operands import Direct, Held, operand
from hpctrain.matmul.panels import panels, turned
from hpctrain.matmul.results import result
from hpctrain.matmul.walks import contract, spread
from hpctrain.shard import split, split_sizes


class Agarwal(Matmul):
    """The 3-D product on any x × y × z ranks: gather A and B, multiply, sum and scatter C.

    Each matrix is cut over two axes and its blocks' rows are spread over the third, so that every element is on one
    rank and a product ends as it began:

        A(m/x, k/y) over z        B(k/y, n/z) over x        C(m/x, n/z) over y

    Its three products are each other's backward: with (A, B, C) as above,

        nn(a, b, rows)   C = A B
        nt(c, b, rows)   A = C Bᵀ
        tn(a, c, rows)   B = Aᵀ C

    `rows` holds how the rows of a block of A are spread over z, of B over x, and of C over y, in three tuples; the
    first and the last are parts of one dim. Panels arrive, or their sums leave, while others are multiplied.

    A product moves mk/(xy) (1-1/z) + kn/(yz) (1-1/x) + mn/(xz) (1-1/y) words to every rank: the lower
    bound, where the blocks of the three matrices have one size (Al Daas et al. 2022, section 5).

    Source: Agarwal, Balle, Gustavson, Joshi and Palkar, "A three-dimensional approach to parallel matrix
    multiplication" (1995).
    """

    layouts = ((("x", "z"), ("y",)), (("y", "x"), ("z",)), (("x", "y"), ("z",)))

    def nn(self, a: torch.Tensor, b: torch.Tensor, rows) -> torch.Tensor:
        """C = A B."""
        b = comm.workspace(self.x).gather(b, rows[1])
        left = self._a(a, rows)
        shape = rows[2][self.y.rank], b.shape[1]
        c = result(self.y, 1, shape, b, 0, rows[2], self._orders(self.y, rows), self._scratch)
        return spread(left, c, lambda panel: (panel, b))

    def nt(self, c: torch.Tensor, b: torch.Tensor, rows) -> torch.Tensor:
        """A = C Bᵀ."""
        return self._nt(self._c(c, rows), b, rows)

    def tn(self, a: torch.Tensor, c: torch.Tensor, rows) -> torch.Tensor:
        """B = Aᵀ C."""
        return self._tn(a, self._c(c, rows), c.shape[1], rows)

    def _nt(self, c, b, rows):
        b = comm.workspace(self.x).gather(b, rows[1])
        shape = rows[0][self.z.rank], len(b)
        a = result(self.z, 0, shape, b, 0, rows[0], self._orders(self.z, rows), self._scratch)
        return spread(c, a, lambda panel: (panel, b.t()))

    def _tn(self, a, c, width, rows):
        k = sum(rows[1])
        x = comm.workspace(self.x)
        room = x.room(k * width, a).view(k, width)
        contract(self._a(a, rows), c, (k, width), transpose=True, out=room)
        return x.reduce_rows(room, rows[1])

    def _a(self, a, rows):
        return operand(Direct, self.z, 0, a, 0, rows[0], self._orders(self.z, rows), self._scratch)

    def _c(self, c, rows):
        return operand(Direct, self.y, 1, c, 0, rows[2], self._orders(self.y, rows), self._scratch)

    def _orders(self, axis, rows):
        """For each rank of y or z, its panels of the rows of A and C in the order of its steps."""
        _, j, d = self._place
        steps = panels(rows[0], rows[2])
        places = [(rank, d) if axis is self.y else (j, rank) for rank in range(axis.size)]
        return [turned(steps, y + z, max(self.y.size, self.z.size)) for y, z in places]

    def _sizes(self, m, k, n):
        i, j, _ = self._place
        x, y, z = self.shape
        m, k = (part.stop - part.start for part in (split(m, x, i), split(k, y, j)))
        return split_sizes(m, z), split_sizes(k, x), split_sizes(m, y)

    def _forward(self, a, b, rows):
        return self.nn(a, b, rows)

    def _backward(self, needed, a, b, grad, rows):
        # gathered once for both
        whole = comm.workspace(self.y).gather(grad, rows[2])
        c = Held(whole, 0, self._orders(self.y, rows)[self.y.rank])
        grad_b = self._tn(a, c, grad.shape[1], rows) if needed[1] else None
        return self._nt(c, b, rows) if needed[0] else None, grad_b

    def volume(self, m, k, n):
        return sum(self._parts(m, k, n))

    def volume_backward(self, m, k, n):
        a, b, c = self._parts(m, k, n)
        return 2 * a + 2 * b + c

    def _parts(self, m, k, n):
        """Words that a rank receives to gather A, to gather B, and to sum C."""
        x, y, z = self.shape
        return tuple(
            rows * columns * (over - 1) / (x * y * z) for rows, columns, over in ((m, k, z), (k, n, x), (m, n, y))
        )

    def _check_grid(self, x, y, z):
        pass  # any will do
