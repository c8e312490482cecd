"""The products nn, nt and tn of local blocks, whose dims are cut anywhere, against serial products of the whole."""

import itertools
import random

import pytest
import torch
from matmul_checks import WAYS, close, products, whole

from hpctrain import Grid
from hpctrain.comm.workspace import new_workspace
from hpctrain.matmul.agarwal import Sharding
from hpctrain.matmul.sharded_dim import Columns, Rows
from hpctrain.matmul.two_half_d_rows import TwoHalfDRows

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3, 4, 6)]


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


@pytest.mark.parametrize("kinds", [(Rows, Rows), (Columns, Columns), (Rows, Columns), (Columns, Rows)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_agarwal(world, way, transposed, kinds):
    """B and C sharded in either of their dims, stored as they are or transposed."""
    generator = random.Random(8)
    for _, mm in products(world, way, ("Agarwal",)):
        x, y, z = mm.x, mm.y, mm.z
        for lengths in ((12, 17, 9), (1, 5, 3), (40, 2, 2)):
            A, B, C = whole(*lengths[:2]), whole(*lengths[1:], seed=1), whole(lengths[0], lengths[2], seed=2)
            over = [cut(generator, length, axis.size) for length, axis in zip(lengths, (x, y, z))]
            m, k, n = (ranges(parts)[axis.rank] for parts, axis in zip(over, (x, y, z)))

            def sharded(kind, axis, length, *others):
                """Sizes that are alike on all ranks that share a block, which have the same places on the others."""
                return kind(axis, cut(random.Random(str((kind, *(each.rank for each in others)))), length, axis.size))

            def stored(matrix, *slices, transposed=transposed):
                return matrix[slices].t().contiguous() if transposed else matrix[slices]

            def own(block, how):
                """This rank's part of a block."""
                return block.split(how.sizes, how.dim)[how.axis.rank].contiguous()

            blocks = A[m, k], stored(B, k, n), stored(C, m, n)
            # the rows of A are those of C, which y and z cut alike everywhere
            of_c = (x,) if kinds[1].dim == transposed else (x, z)
            how = Sharding(
                sharded(Rows, z, len(blocks[0]), x),
                sharded(kinds[0], x, blocks[1].shape[kinds[0].dim], y, z),
                sharded(kinds[1], y, blocks[2].shape[kinds[1].dim], *of_c),
                transposed,
            )
            a, b, c = map(own, blocks, how[:3])
            expected_a, expected_b = own((C @ B.T)[m, k], how.a), own(stored(A.T @ C, k, n), how.b)
            close(mm.nn(a, b, how), own(stored(A @ B, m, n), how.c))
            close(mm.nt(c, b, how), expected_a)
            close(mm.tn(a, c, how), expected_b)
            gathered = mm.gathered_c(c, how)  # valid until the next call that gathers or sums over its axis
            close(mm.tn(a, gathered, how), expected_b)
            close(mm.nt(gathered, mm.gathered_b(b, how), how), expected_a)
            close(mm.tn_start(a, gathered, how).wait(), expected_b)


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
    buffer = workspace.buffer(matrix.numel(), matrix).view(matrix.shape)
    return workspace.reduce_columns(buffer.copy_(matrix), widths)


@pytest.mark.parametrize("one_node", [True, False])
def test_matrices_travel_and_their_adjoints(world, one_node):
    """<Fx, y> = <x, F*y> over all ranks, and each result from the whole matrix."""
    axis = Grid(tensor=world.size).tensor.x
    axis.one_node = one_node
    workspace, rank = new_workspace(axis, torch.empty(0)), axis.rank
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
        workspace = new_workspace(axis, torch.empty(0))
        counts, widths = rows_of(axis), columns_of(axis)
        row, column = counts[axis.rank], widths[axis.rank]
        workspace.gather_columns(whole(5, column), widths)
        reduced(workspace, whole(5, sum(widths)), widths)
        workspace.rows_to_columns(whole(row, sum(widths)), counts, widths)
        workspace.columns_to_rows(whole(sum(counts), column), counts, widths)
        tables.append(axis.transport.traffic.table())
    assert tables[0] == tables[1]
