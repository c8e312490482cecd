"""The parallel matrix product that layers are built on, and the layout of activations that follows from it.

Two families. Between layers, both have matrices in the residual layout: rows over (z, x), columns over y.

    box      agarwal, megatron               the inner layout has rows over z and columns over (x, y)
    plane    cannon, summa, two_half_d       the inner layout is the residual one; x cuts the rows at whole sequences
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hpctrain.choices import DEFAULT_OVERLAP, check_overlap, check_product
from hpctrain.grid import Axis, Grid
from hpctrain.layers.rules import BOX, PLANE, shard
from hpctrain.layout import Rules
from hpctrain.matmul import Agarwal, Cannon, Summa
from hpctrain.matmul.plane import Plane
from hpctrain.matmul.two_half_d_rows import TwoHalfDRows
from hpctrain.shard import Shard, split, split_sizes, subsplit


def algorithm_of(grid: Grid, name: str | Algorithm, overlap: Sequence[str] = DEFAULT_OVERLAP) -> Algorithm:
    """The algorithm of this name on the tensor axes of a grid; one that is made already is returned as it is.

    `overlap` names what runs beside the products of the box family; see `choices.OVERLAPS`.

    "agarwal": Agarwal's 3-D product on any x × y × z box. "megatron": column- and row-parallel pairs with norms in
    sequence parallel form, on (t, 1, 1). "cannon": Cannon's product on (q, q, 1). "summa": SUMMA on (x, y, 1).
    "two_half_d": the 2.5-D product on (q, q, c).

    Raises:
        ValueError: on every rank, for other names, a grid that the algorithm does not work on, or one of another grid.
    """
    if isinstance(name, Algorithm):
        if name.grid.shape != grid.shape:
            raise ValueError(
                f"algorithm was made for a grid of {name.grid.shape}, and the layer is of {grid.shape}; make it by "
                "layers.algorithm_of with the layer's grid"
            )
        return name
    tensor = grid.tensor
    check_overlap(overlap)
    check_product(name, tensor.x.size, tensor.y.size, tensor.z.size)
    return BoxAlgorithm(grid, name, overlap) if name in ("agarwal", "megatron") else PlaneAlgorithm(grid, name)


class Algorithm:
    """What layers ask of an algorithm.

    Attributes:
        name: as in the configuration.
        columns: the axis over which the inner layout spreads features.
        rows: the axis over which it spreads rows.
        rules: over which axes the dims of weights and activations are cut.
    """

    columns: Axis
    rows: Axis
    rules: Rules

    def __init__(self, grid: Grid, name: str):
        self.grid, self.name, self.x, self.y, self.z = grid, name, grid.tensor.x, grid.tensor.y, grid.tensor.z

    def shard(self, dims: dict[str, int | tuple[int, int]]) -> Shard:
        """Of this rank's part of a parameter, by `rules`."""
        return shard(self.rules, self.grid, dims)

    def inner(self, length: int, unit: int = 1, rank: int | None = None) -> slice:
        """The features that a rank of `columns`, this one by default, holds in the inner layout."""
        raise NotImplementedError

    def rows_over_x(self, sequences: int, length: int) -> tuple[int, ...]:
        """Residual rows of the ranks of x, of a z block of whole sequences."""
        raise NotImplementedError

    def inner_sequences(self, sequences: int) -> slice:
        """Which sequences of the z block this rank holds in the inner layout."""
        raise NotImplementedError


class BoxAlgorithm(Algorithm):
    """Agarwal's family: a layer gathers its operands and scatters its result."""

    rules = BOX

    def __init__(self, grid: Grid, name: str, overlap: Iterable[str]):
        super().__init__(grid, name)
        self.columns, self.rows = grid.plane("x", "y"), self.z
        self.overlap = frozenset(overlap)
        self.matmul = Agarwal(grid.tensor)

    def inner(self, length: int, unit: int = 1, rank: int | None = None) -> slice:
        i, j = divmod(self.columns.rank if rank is None else rank, self.y.size)
        return subsplit(split(length, self.x.size, i, unit), self.y.size, j, unit)

    def rows_over_x(self, sequences: int, length: int) -> tuple[int, ...]:
        return split_sizes(sequences * length, self.x.size)

    def inner_sequences(self, sequences: int) -> slice:
        return slice(0, sequences)


class PlaneAlgorithm(Algorithm):
    """The family of Cannon's product: blocks stay where they are, and panels of them travel."""

    rules = PLANE

    def __init__(self, grid: Grid, name: str):
        super().__init__(grid, name)
        self.columns, self.rows = self.y, grid.plane("x", "z")
        products: dict[str, type[Plane]] = {"cannon": Cannon, "summa": Summa, "two_half_d": TwoHalfDRows}
        self.matmul = products[name](grid.tensor)

    def inner(self, length: int, unit: int = 1, rank: int | None = None) -> slice:
        return split(length, self.y.size, self.y.rank if rank is None else rank, unit)

    def rows_over_x(self, sequences: int, length: int) -> tuple[int, ...]:
        return split_sizes(sequences * length, self.x.size, max(1, length))

    def inner_sequences(self, sequences: int) -> slice:
        return split(sequences, self.x.size, self.x.rank)
