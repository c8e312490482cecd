"""The products nn, nt and tn of local blocks, whose dims are cut anywhere, against serial products of the whole."""

import itertools
import random

import pytest
import torch
from matmul_checks import WAYS, close, products, whole

from hpctrain import Grid
from hpctrain.comm.workspaces import Workspace
from hpctrain.matmul.depth_rows import TwoHalfDRows

pytestmark = pytest.mark.mpi


def cut(generator, length, parts):
    """A partition of `length` at arbitrary places, empty parts included."""
    places = sorted(generator.choice((0, length, *range(length + 1))) for _ in range(parts - 1))
    return tuple(stop - start for start, stop in itertools.pairwise((0, *places, length)))


def ranges(sizes):
    return [slice(stop - size, stop) for size, stop in zip(sizes, itertools.accumulate(sizes))]


class Cut:
    """A dim cut over x, within that over z, and over y; the same on all ranks."""

    def __init__(self, generator, mm, length):
        x, y, z = mm.shape
        self.length, self.mm = length, mm
        over_x = cut(generator, length, x)
        self.over_xz = tuple(cut(generator, part, z) for part in over_x)
        deep = isinstance(mm, TwoHalfDRows)
        self.over_y = over_x if deep else cut(generator, length, y)
        self.sizes = (self.over_xz if deep else over_x), self.over_y

    @property
    def rows(self):
        """This rank's part, as rows."""
        parts = ranges(tuple(itertools.chain(*self.over_xz)))
        return parts[self.mm.x.rank * self.mm.z.size + self.mm.z.rank]

    @property
    def columns(self):
        return ranges(self.over_y)[self.mm.y.rank]

    @property
    def over_z(self):
        return self.over_xz[self.mm.x.rank]


@pytest.mark.parametrize("way", WAYS)
def test_plane(world, way):
    generator = random.Random(7)
    for _, mm in products(world, way, ("Cannon", "Summa", "TwoHalfDRows")):
        for lengths in ((12, 17, 9), (1, 5, 3), (40, 2, 2)):
            m, k, n = (Cut(generator, mm, length) for length in lengths)
            A, B = whole(m.length, k.length), whole(k.length, n.length, seed=1)
            c = (A @ B)[m.rows, n.columns]
            close(mm.nn(A[m.rows, k.columns], B[k.rows, n.columns], k.sizes, m.over_z), c)
            close(mm.nt(A[m.rows, k.columns], B.T[n.rows, k.columns], n.sizes, m.over_z), c)
            close(mm.tn(A.T[k.rows, m.columns], B[k.rows, n.columns], m.sizes, k.over_z), c)


@pytest.mark.parametrize("way", WAYS)
def test_agarwal(world, way):
    generator = random.Random(8)
    for _, mm in products(world, way, ("Agarwal",)):
        x, y, z = (mm.x, mm.y, mm.z)
        for lengths in ((12, 17, 9), (1, 5, 3), (40, 2, 2)):
            A, B, G = whole(*lengths[:2]), whole(*lengths[1:], seed=1), whole(lengths[0], lengths[2], seed=2)
            over = [cut(generator, length, axis.size) for length, axis in zip(lengths, (x, y, z))]
            m, k, n = (ranges(parts)[axis.rank] for parts, axis in zip(over, (x, y, z)))

            def rows(name, axis, part, spread):
                """How a block's rows are spread: drawn alike by all ranks that hold the same rows."""
                return cut(random.Random(f"{name} {axis.rank} {part}"), part.stop - part.start, spread.size)

            counts = rows("a", x, m, z), rows("b", y, k, x), rows("c", x, m, y)
            a_rows, b_rows, c_rows = (ranges(count)[axis.rank] for count, axis in zip(counts, (z, x, y)))
            a, b, g = A[m, k][a_rows], B[k, n][b_rows], G[m, n][c_rows]
            close(mm.nn(a, b, counts), (A @ B)[m, n][c_rows])
            close(mm.nt(g, b, counts), (G @ B.T)[m, k][a_rows])
            close(mm.tn(a, g, counts), (A.T @ G)[k, n][b_rows])


def test_sizes_of_two_dims_are_refused(world):
    for _, mm in products(world, "shared memory", ("Summa",)):
        with pytest.raises(ValueError, match="two partitions of one dim"):
            mm.nn(whole(2, 7), whole(1, 2), ((1,) * mm.x.size, (100,) * mm.y.size))
    for _, mm in products(world, "shared memory", ("TwoHalfDRows",)):
        _, over_y = sizes = mm.cut(5 * mm.y.size)
        other = sizes[0], (over_y[0] + 1, *over_y[1:])
        for product in (mm.nn, mm.nt, mm.tn):
            with pytest.raises(ValueError, match="alike over x and over y"):
                product(whole(1, 1), whole(1, 1), other, (1,) * mm.z.size)


# The matrix operations of a workspace ----------------------------------------------------------------------------


def columns_of(axis):
    return tuple(1 + 2 * r % 3 for r in range(axis.size))  # 1, 3, 2, 1, 3, 2, ...


def rows_of(axis):
    return tuple((r + 1) % 3 for r in range(axis.size))  # 1, 2, 0, 1, 2, 0, ...


def reduced(workspace, matrix, widths):
    room = workspace.room(matrix.numel(), matrix).view(matrix.shape)
    return workspace.reduce_columns(room.copy_(matrix), widths)


@pytest.mark.parametrize("one_node", [True, False])
def test_matrices_travel_and_their_adjoints(world, one_node):
    """<Fx, y> = <x, F*y> over all ranks, and each result from the whole matrix."""
    axis = Grid(tensor=world.size).tensor.x
    axis.one_node = one_node
    workspace, rank = Workspace(axis), axis.rank
    counts, widths = rows_of(axis), columns_of(axis)
    row, column = ranges(counts)[rank], ranges(widths)[rank]
    rows, columns = sum(counts), sum(widths)
    M, N = whole(rows, columns), whole(rows, columns, seed=1)
    mine = whole(rows, columns, seed=2 + rank)

    assert torch.equal(workspace.gather_columns(M[:, column], widths), M)
    expected = sum(whole(rows, columns, seed=2 + r) for r in range(axis.size))[:, column]
    close(reduced(workspace, mine, widths), expected)
    assert torch.equal(workspace.rows_to_columns(M[row], counts, widths), M[:, column])
    assert torch.equal(workspace.columns_to_rows(M[:, column], counts, widths), M[row])

    def dot(a, b):
        return axis.comm.allreduce(float((a * b).sum()))

    gathered = workspace.gather_columns(M[:, column], widths).clone()
    assert dot(gathered, mine) == pytest.approx(dot(M[:, column], reduced(workspace, mine, widths)), rel=1e-12)
    moved = workspace.rows_to_columns(M[row], counts, widths).clone()
    back = workspace.columns_to_rows(N[:, column], counts, widths)
    assert dot(moved, N[:, column]) == pytest.approx(dot(M[row], back), rel=1e-12)


def test_matrices_count_alike(world):
    tables = []
    for one_node in (True, False):
        axis = Grid(tensor=world.size).tensor.x
        axis.one_node = one_node
        workspace = Workspace(axis)
        counts, widths = rows_of(axis), columns_of(axis)
        row, column = counts[axis.rank], widths[axis.rank]
        workspace.gather_columns(whole(5, column), widths)
        reduced(workspace, whole(5, sum(widths)), widths)
        workspace.rows_to_columns(whole(row, sum(widths)), counts, widths)
        workspace.columns_to_rows(whole(sum(counts), column), counts, widths)
        tables.append(axis.wire.traffic.table())
    assert tables[0] == tables[1]
