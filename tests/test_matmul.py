"""Every algorithm on every grid that is legal for it, in shared memory and by messages, against the serial product."""

import functools

import pytest
import torch
from comm_checks import complete, started
from hypothesis import given
from hypothesis import strategies as st
from matmul_checks import ALGORITHMS, WAYS, close, grids, legal, products, whole

from hpctrain import Grid, matmul
from hpctrain.comm import functional

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3, 4, 6, 8)]

SHAPES = {
    "even": (72, 72, 72),
    "uneven": (29, 31, 23),
    "tall": (61, 3, 2),
    "flat": (2, 5, 50),
    "deep": (3, 67, 4),
    "thinner than the grid": (2, 1, 2),
    "tiny": (1, 1, 1),
    "empty": (5, 0, 7),
}


@pytest.mark.parametrize("way", WAYS)
def test_product_and_gradients(world, case, way):
    """All sizes on up to four ranks; on more some of them by each way."""
    shapes = list(enumerate(SHAPES.values()))
    for _, mm in products(world, way):
        for number, (m, k, n) in shapes if world.size <= 4 else shapes[case::3]:
            A, B, G = whole(m, k, seed=number), whole(k, n, seed=100 + number), whole(m, n, seed=200 + number)
            a, b = mm.scatter_a(A).requires_grad_(), mm.scatter_b(B).requires_grad_()
            c = mm(a, b)
            block = mm.slices("c", m, n)
            close(c, (A @ B)[block])
            c.backward(G[block])
            close(a.grad, (G @ B.T)[mm.slices("a", m, k)])
            close(b.grad, (A.T @ G)[mm.slices("b", k, n)])
            close(mm.gather_c(c.detach()), A @ B)
            mm(a, b).mul_(2).backward(G[block])  # changed in place, which torch refuses of an autograd function's views
            close(a.grad, (3 * G @ B.T)[mm.slices("a", m, k)])


@functools.cache  # a grid makes several communicators
def every_product(way):
    from mpi4py import MPI

    return list(products(MPI.COMM_WORLD, way))


@given(st.tuples(*[st.integers(0, 40)] * 3), st.sampled_from(sorted(WAYS)))
def test_any_sizes(sizes, way):
    """On every rank the same examples: they follow from the name of the test, or from --hypothesis-seed."""
    m, k, n = sizes
    A, B, G = whole(m, k, seed=1), whole(k, n, seed=2), whole(m, n, seed=3)
    for _, mm in every_product(way):
        a, b = mm.scatter_a(A).requires_grad_(), mm.scatter_b(B).requires_grad_()
        c = mm(a, b)
        c.backward(G[mm.slices("c", m, n)])
        close(mm.gather_c(c.detach()), A @ B)
        close(a.grad, (G @ B.T)[mm.slices("a", m, k)])
        close(b.grad, (A.T @ G)[mm.slices("b", k, n)])


@pytest.mark.parametrize("way", ["shared memory", "messages"])
def test_one_gradient_alone(world, way):
    m, k, n = 13, 9, 11
    A, B, G = whole(m, k), whole(k, n, seed=1), whole(m, n, seed=2)
    moved = {"a": 0, "b": 0, "both": 0}
    for grid, mm in products(world, way):

        def gradients(name, c, operands, mm=mm, ledger=grid.transport.traffic):
            ledger.clear()
            found = torch.autograd.grad(c, operands, G[mm.slices("c", m, n)])
            moved[name] += ledger.total("received")
            return found

        a, b = mm.scatter_a(A), mm.scatter_b(B)
        (grad_a,) = gradients("a", mm(a.requires_grad_(), b), [a])
        (grad_b,) = gradients("b", mm(a.detach(), b.requires_grad_()), [b])
        close(grad_a, (G @ B.T)[mm.slices("a", m, k)])
        close(grad_b, (A.T @ G)[mm.slices("b", k, n)])
        gradients("both", mm(a, b), [a, b])
    if world.size > 1:  # what the other one would take is not moved
        assert max(moved["a"], moved["b"]) < moved["both"]


def test_nothing_is_under_way_after_a_product(world, monkeypatch):
    """So that a block may be changed as soon as the product is there."""
    works = started(monkeypatch)
    for _, mm in products(world, "messages"):
        a, b = mm.scatter_a(whole(29, 31)).requires_grad_(), mm.scatter_b(whole(31, 23)).requires_grad_()
        mm(a, b).sum().backward()
    assert (world.size > 1) == bool(works)
    assert complete(works)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("way", ["shared memory", "messages"])
def test_gradcheck(world, way):
    """Finite differences of the whole product, which every rank takes at once: twenty products for each element."""
    for grid, mm in products(world, way):

        def product(A, B, mm=mm, axis=grid.tensor):
            # the mean over ranks leaves equal values as they are, and its adjoint sums the blocks' gradients
            A, B = (functional.all_reduce(matrix, axis) / axis.size for matrix in (A, B))
            return mm.gather_c(mm(mm.scatter_a(A), mm.scatter_b(B)))

        A, B = whole(2, 3).requires_grad_(), whole(3, 2, seed=1).requires_grad_()
        assert torch.autograd.gradcheck(product, (A, B), nondet_tol=0)


@pytest.mark.parametrize("way", WAYS)
def test_bytes_are_the_volume(world, way):
    """Sent and received, forward and backward, where the sizes divide evenly."""
    for grid, mm in products(world, way):
        for m, k, n in ((72, 72, 72), (144, 72, 216)):
            a, b = mm.scatter_a(whole(m, k)).requires_grad_(), mm.scatter_b(whole(k, n)).requires_grad_()
            ledger = grid.transport.traffic
            ledger.clear()
            c = mm(a, b)
            assert ledger.total("received") == pytest.approx(8 * mm.volume(m, k, n), rel=1e-12, abs=0)
            ledger.clear()
            c.backward(torch.ones_like(c))
            assert ledger.total("received") == pytest.approx(8 * mm.volume_backward(m, k, n), rel=1e-12, abs=0)


@pytest.mark.parametrize("way", ["shared memory", "messages"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_other_dtypes(world, way, dtype, tolerance):
    m, k, n = 29, 31, 23
    A, B, G = (whole(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(((m, k), (k, n), (m, n))))
    for _, mm in products(world, way):
        a, b = mm.scatter_a(A).requires_grad_(), mm.scatter_b(B).requires_grad_()
        c = mm(a, b)
        c.backward(G[mm.slices("c", m, n)])
        assert c.dtype == a.grad.dtype == b.grad.dtype == dtype
        for block, matrix, rest in ((c, A.double() @ B.double(), ("c", m, n)),
                                    (a.grad, G.double() @ B.double().T, ("a", m, k)),
                                    (b.grad, A.double().T @ G.double(), ("b", k, n))):  # fmt: skip
            close(block.double(), matrix[mm.slices(*rest)], tolerance)


@pytest.mark.parametrize("way", ["shared memory", "messages"])
def test_bfloat16_is_rounded_once(world, way):
    """256 + 1 + 1 + ..., a term on each rank: in bfloat16, each 1 would be lost."""
    p = world.size
    A, B = torch.ones(p, p, dtype=torch.bfloat16), torch.ones(p, p, dtype=torch.bfloat16)
    A[:, 0] = 256
    expected = torch.full((p, p), 255.0 + p).to(torch.bfloat16)
    for _, mm in products(world, way):
        if max(mm.shape) < p:
            continue  # several terms are on one rank, whose sum of them is rounded to travel
        assert torch.equal(mm.gather_c(mm(mm.scatter_a(A), mm.scatter_b(B))), expected)


def test_equal_input_gives_equal_bits(world):
    for _, mm in products(world, "messages"):
        a, b = mm.scatter_a(whole(29, 31)), mm.scatter_b(whole(31, 23))
        first = mm(a, b)
        for _ in range(5):
            assert torch.equal(mm(a, b), first)


def test_wrong_grids_are_refused(world):
    for box, grid in grids(world, "shared memory"):
        for algorithm in ALGORITHMS:
            if not legal(algorithm, box):
                with pytest.raises(ValueError, match=f"{algorithm} needs .*, got x={box[0]}, y={box[1]}, z={box[2]}"):
                    getattr(matmul, algorithm)(grid.tensor)


@pytest.mark.ranks(1, 2, 3)
def test_wrong_blocks_are_refused(world):
    mm = matmul.Agarwal(Grid(tensor=world.size).tensor)
    with pytest.raises(ValueError, match="not known"):
        mm(whole(1, 1), whole(1, 1))
    p = world.size
    mm.bind(2 * p, 4, 3 * p)
    with pytest.raises(ValueError, match="call bind"):
        mm(whole(3, 4), whole(4, 3))
    a, b = mm.scatter_a(whole(2 * p, 5)), mm.scatter_b(whole(4, 3))
    with pytest.raises(ValueError, match="cannot be multiplied"):
        mm(a, b)


def test_blocks_made_elsewhere(world):
    """`bind` says what `scatter` otherwise knows; one object serves many sizes."""
    for _, mm in products(world, "shared memory"):
        for m, k, n in ((6, 5, 4), (3, 8, 9), (6, 5, 4)):
            A, B = whole(m, k), whole(k, n)
            mm.bind(m, k, n)
            c = mm(A[mm.slices("a", m, k)], B[mm.slices("b", k, n)])
            close(c, (A @ B)[mm.slices("c", m, n)])
