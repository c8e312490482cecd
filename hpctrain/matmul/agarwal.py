"""Agarwal's 3-D product."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hpctrain import comm
from hpctrain.grid import Axis
from hpctrain.matmul.base import Matmul
from hpctrain.matmul.operands import Direct, Gathered, Operand, Orders, operand
from hpctrain.matmul.panels import in_place, panels, rotated
from hpctrain.matmul.pipelined_loops import contract, map_panels
from hpctrain.matmul.results import WholeSum, result
from hpctrain.matmul.sharded_dim import Rows, ShardedDim, summand_buffer
from hpctrain.shard import split, split_sizes


class Sharding(NamedTuple):
    """How the blocks of A, B and C are sharded over the third axis: the one that their dims are not cut over.

    A's rows are; of B and C it may be the rows or the columns. `transposed` says that B and C are stored transposed: a
    layer's y = x Wᵀ is Cᵀ = Bᵀ Aᵀ, whose A is the weight. `b` and `c` are of the matrices as they are stored.
    """

    a: Rows
    b: ShardedDim
    c: ShardedDim
    transposed: bool = False

    @property
    def panels_in_c(self) -> bool:
        """Whether the dim that A is sharded in is the one that C is, so that panels of both are the same."""
        return self.c.dim == self.transposed


class Agarwal(Matmul):
    """The 3-D product on any x × y × z ranks: gather A and B, multiply, sum and scatter C.

    Each matrix is cut over two axes and its blocks are sharded over the third, so that every element is on one rank and
    a product ends as it began:

        A(m/x, k/y) over z        B(k/y, n/z) over x        C(m/x, n/z) over y

    Its three products are each other's backward: with (A, B, C) as above,

        nn(a, b)   C = A B
        nt(c, b)   A = C Bᵀ
        tn(a, c)   B = Aᵀ C

    A `Sharding` says along which of their dims the blocks are sharded; here by rows, in a layer as activations lie.
    Between nodes, panels of A arrive, and of C arrive or leave, while others are multiplied.

    A product moves mk/(xy) (1-1/z) + kn/(yz) (1-1/x) + mn/(xz) (1-1/y) elements to every rank: the lower
    bound, where the blocks of the three matrices have one size (Al Daas et al. 2022, section 5).

    Source: Agarwal, Balle, Gustavson, Joshi and Palkar, "A three-dimensional approach to parallel matrix
    multiplication" (1995).
    """

    layouts = ((("x", "z"), ("y",)), (("y", "x"), ("z",)), (("x", "y"), ("z",)))

    def __init__(self, tensor: Axis):
        super().__init__(tensor)
        nodes = torch.tensor(tensor.nodes).view(self.shape)
        # whether every rank of the box has its neighbours along the axis on its node
        self._on_nodes = {
            axis: bool((nodes == nodes.narrow(dim, 0, 1)).all()) for dim, axis in enumerate((self.x, self.y, self.z))
        }

    def in_place(self, axis: Axis, block: torch.Tensor) -> bool:
        """Whether the axis's blocks are within reach, on every rank of the box. Asked of all: a node may hold some of
        them only, and ranks that sum in shared memory along one axis must lay out their summands alike."""
        return self._on_nodes[axis] and in_place(axis, block)

    def nn(
        self, a: torch.Tensor, b: torch.Tensor, sharding: Sharding, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """C = A B, plus `bias` where C is stored transposed."""
        b = sharding.b.gather(b)
        if self.in_place(sharding.a.axis, b) and (not sharding.panels_in_c or self.in_place(sharding.c.axis, b)):
            left, right = _factors_of_c(sharding.a.gather(a), b, sharding)
            return sharding.c.multiply(left, right, bias)
        source = operand(Direct, sharding.a, 0, a, self._orders(sharding.a, sharding), self._scratch)
        n = b.shape[not sharding.transposed]
        if sharding.panels_in_c:
            target = result(sharding.c, 1, n, b, self._orders(sharding.c, sharding), self._scratch)
        else:
            m = sum(sharding.a.sizes)
            shape = (n, m) if sharding.transposed else (m, n)
            target = WholeSum(sharding.c, shape, b, int(sharding.transposed), source.order)
        c = map_panels(source, target, lambda panel: _factors_of_c(panel, b, sharding))
        return c if bias is None else c.add_(bias)

    def nt(
        self,
        c: torch.Tensor | Gathered,
        b: torch.Tensor | Gathered,
        sharding: Sharding,
        out: torch.Tensor | None = None,
        plus: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """A = C Bᵀ; `out` and `plus` as in `Rows.multiply`."""
        whole = b.whole if isinstance(b, Gathered) else sharding.b.gather(b)
        source = self._c(c, sharding, whole=plus is not None)
        if isinstance(source, Gathered) and (plus is not None or self.in_place(sharding.a.axis, whole)):
            left, right = _factors_of_a(source.whole, whole, sharding)
            return sharding.a.multiply(left, right, out=out, plus=plus)
        k = whole.shape[sharding.transposed]
        target = result(sharding.a, 0, k, whole, self._orders(sharding.a, sharding), self._scratch)
        return map_panels(source, target, lambda panel: _factors_of_a(panel, whole, sharding))

    def tn(self, a: torch.Tensor, c: torch.Tensor | Gathered, sharding: Sharding) -> torch.Tensor:
        """B = Aᵀ C."""
        of_c = self._c(c, sharding)
        if isinstance(of_c, Gathered) and self.in_place(sharding.a.axis, a):
            return sharding.b.multiply(*_factors_of_b(sharding.a.gather(a), of_c.whole, sharding))
        k, n = a.shape[1], (of_c.whole if isinstance(of_c, Gathered) else of_c.block).shape[not sharding.transposed]
        partial = summand_buffer(sharding.b.axis, (n, k) if sharding.transposed else (k, n), a)
        source = operand(Direct, sharding.a, 0, a, self._orders(sharding.a, sharding), self._scratch)
        left, right = (of_c, source) if sharding.transposed else (source, of_c)
        contract(left, right, partial.shape, transpose=not sharding.transposed, out=partial)
        return sharding.b.reduce(partial)

    def tn_start(self, a: torch.Tensor, c: Gathered, sharding: Sharding) -> comm.Work[torch.Tensor]:
        """`tn`, whose sum over ranks is but begun; `wait()` returns it. A is gathered whole."""
        return sharding.b.multiply_start(*_factors_of_b(sharding.a.gather(a), c.whole, sharding))

    def gathered_b(self, b: torch.Tensor, sharding: Sharding) -> Gathered:
        """B whole, for several products."""
        return Gathered(sharding.b.gather(b), sharding.b.dim)

    def gathered_c(self, c: torch.Tensor, sharding: Sharding) -> Gathered:
        """C whole, for several products."""
        order = () if self.in_place(sharding.a.axis, c) else self._orders(sharding.c, sharding)[sharding.c.axis.rank]
        return Gathered(sharding.c.gather(c), int(sharding.transposed), order)

    def _c(self, c: torch.Tensor | Gathered, sharding: Sharding, whole: bool = False) -> Operand:
        if isinstance(c, Gathered):
            return c
        if whole or not sharding.panels_in_c or self.in_place(sharding.c.axis, c):
            return self.gathered_c(c, sharding)
        return Direct(sharding.c, 1, c, self._orders(sharding.c, sharding), self._scratch)

    def _orders(self, sharded: ShardedDim, sharding: Sharding) -> Orders:
        """For each rank of the axis of A or C, its panels of the rows of A in the order of its steps."""
        z, y = sharding.a.axis, sharding.c.axis
        steps = panels(sharding.a.sizes, sharding.c.sizes if sharding.panels_in_c else (sum(sharding.a.sizes),))
        other = y.rank if sharded is sharding.a else z.rank
        return [rotated(steps, rank + other, max(y.size, z.size)) for rank in range(sharded.axis.size)]

    def _sizes(self, m: int, k: int, n: int) -> Sharding:
        i, j, _ = self._place
        x, y, z = self.shape
        m, k = (part.stop - part.start for part in (split(m, x, i), split(k, y, j)))
        return Sharding(
            Rows(self.z, split_sizes(m, z)), Rows(self.x, split_sizes(k, x)), Rows(self.y, split_sizes(m, y))
        )

    def _forward(self, a, b, sharding):
        return self.nn(a, b, sharding)

    def _backward(self, needed, a, b, grad, sharding):
        c = self.gathered_c(grad, sharding)  # once for both
        grad_b = self.tn(a, c, sharding) if needed[1] else None
        return self.nt(c, b, sharding) if needed[0] else None, grad_b

    def volume(self, m: int, k: int, n: int) -> float:
        return sum(self._parts(m, k, n))

    def volume_backward(self, m: int, k: int, n: int) -> float:
        a, b, c = self._parts(m, k, n)
        return 2 * a + 2 * b + c

    def _parts(self, m: int, k: int, n: int) -> tuple[float, float, float]:
        """Elements that a rank receives to gather A, to gather B, and to sum C."""
        x, y, z = self.shape
        box = x * y * z
        return m * k * (z - 1) / box, k * n * (x - 1) / box, m * n * (y - 1) / box

    def _check_grid(self, x, y, z):
        pass  # any will do


# The factors of each matrix as it is stored, from those as they are stored.


Factors = tuple[torch.Tensor, torch.Tensor]


def _factors_of_c(a: torch.Tensor, b: torch.Tensor, sharding: Sharding) -> Factors:
    return (b, a.t()) if sharding.transposed else (a, b)


def _factors_of_a(c: torch.Tensor, b: torch.Tensor, sharding: Sharding) -> Factors:
    return (c.t(), b) if sharding.transposed else (c, b.t())


def _factors_of_b(a: torch.Tensor, c: torch.Tensor, sharding: Sharding) -> Factors:
    return (c, a) if sharding.transposed else (a.t(), c)
