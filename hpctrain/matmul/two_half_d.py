"""The 2.5-D product: a plane of q × q ranks, c deep."""

from __future__ import annotations

from hpctrain import comm
from hpctrain.matmul.operands import Direct
from hpctrain.matmul.plane import Plane
from hpctrain.shard import split_sizes


class TwoHalfD(Plane):
    """Cannon's product on each of c planes of q × q ranks, of which each has 1/c of the dim that is summed over.

        A(m/x, k/(y z))        B(k/(x z), n/y)        C(m/x, n/(y z)), summed over z

    Every element is on one rank, and C is cut as the A of a next product is. Backward gathers C's gradient over z, once
    for both. `nn`, `nt` and `tn` are those of one depth.

    On every rank, with w = 1/(q²c), a product moves ((mk + kn) (q-1) + mn (c-1)) w elements, and its backward
    (2 (mk + kn) (q-1) + mn (c-1)) w. Agarwal's on the same ranks moves (mk (c-1) + (kn + mn) (q-1)) w and
    (2 mk (c-1) + (2 kn + mn) (q-1)) w: it cuts n over z, not k, and so gathers A where this one sums C.

    - Forward the two are equal where k = n or q = c, and the lower bound for a cube on q × q × q. Elsewhere this one
      moves m (k-n) (q-c) w more, which may be negative; at most k/n or n/k of the other's, as on 1 × 1 × c. To have
      the least for every shape, the cut of A would have to depend on n.
    - Backward, of square matrices, it moves 4 (q-1) + (c-1) to Agarwal's 3 (q-1) + 2 (c-1): half of it on
      1 × 1 × c, as much on q × q × q, 9/8 on 3 × 3 × 2. Where C stays, both A and B travel twice.

    Source: Solomonik and Demmel, "Communication-optimal parallel 2.5D matrix multiplication and LU factorization
    algorithms" (2011), algorithm 2, which replicates both operands on every depth. A depth needs no more than its part.
    """

    layouts = ((("x",), ("y", "z")), (("x", "z"), ("y",)), (("x",), ("y", "z")))
    _kind = Direct

    def _sizes(self, m, k, n):
        """How this depth's part of k is cut over x, and over y; and this y's part of n over z."""
        q, _, c = self.shape
        depth = tuple(split_sizes(part, c)[self.z.rank] for part in split_sizes(k, q))
        return depth, split_sizes(split_sizes(n, q)[self.y.rank], c)

    def _forward(self, a, b, sizes):
        depth, widths = sizes
        z = comm.workspace(self.z, a)
        summand = z.buffer(len(a) * b.shape[1], b).view(len(a), b.shape[1])
        self._nn(a, b, depth, depth, out=summand)
        return z.reduce_columns(summand, widths)

    def _backward(self, needed, a, b, grad, sizes):
        depth, widths = sizes
        grad = comm.workspace(self.z, grad).gather_columns(grad, widths)
        return (
            self._nt(grad, b, depth, depth) if needed[0] else None,
            self._tn(a, grad, depth, depth) if needed[1] else None,
        )

    def volume(self, m: int, k: int, n: int) -> float:
        operands, result = self._parts(m, k, n)
        return operands + result

    def volume_backward(self, m: int, k: int, n: int) -> float:
        operands, result = self._parts(m, k, n)
        return 2 * operands + result

    def _parts(self, m, k, n):
        """Elements that a rank receives of A and B, and of C."""
        q, _, c = self.shape
        ranks = q * q * c
        return (m * k + k * n) * (q - 1) / ranks, m * n * (c - 1) / ranks

    def _check_grid(self, x, y, z):
        if x != y:
            raise self._refuse("q × q × c ranks")

    def _turn(self, product, i, j):
        return i + j, self.x.size
