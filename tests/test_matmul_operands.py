"""Operands of any dims and of other array libraries, as torch.matmul takes them, against it."""

import numpy as np
import pytest
import torch
from matmul_checks import close, products, whole

from hpctrain import Grid, matmul

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 4)]

OPERANDS = {
    "vectors": ((7,), (7,)),
    "vector and matrix": ((7,), (7, 5)),
    "matrix and vector": ((5, 7), (7,)),
    "stack and matrix": ((3, 2, 5, 7), (7, 4)),
    "stack and vector": ((3, 5, 7), (7,)),
    "matrix and stack": ((5, 7), (3, 7, 4)),
    "vector and stack": ((7,), (2, 3, 7, 4)),
    "two stacks": ((3, 5, 7), (3, 7, 4)),
    "broadcast": ((2, 1, 3, 5), (4, 5, 2)),
    "no matrices": ((0, 3, 5), (0, 5, 2)),
    "no rows": ((2, 0, 5), (5, 2)),
    "no terms": ((2, 3, 0), (0, 2)),
}


@pytest.mark.parametrize("way", ["shared memory", "messages"])
def test_as_torch_matmul(world, way):
    for grid, mm in products(world, way):
        for number, shapes in enumerate(OPERANDS.values()):
            A, B = (whole(*shape, seed=number + seed).requires_grad_() for seed, shape in enumerate(shapes))
            expected = A @ B
            G = whole(*expected.shape, seed=9)
            expected_grads = torch.autograd.grad(expected, (A, B), G)
            C = mm.gather_c(mm(*mm.scatter(A, B)))
            assert C.shape == expected.shape
            close(C, expected)
            # every rank takes the same of the whole C, and each has the gradient of its own blocks
            grads = torch.autograd.grad(C, (A, B), G / grid.size)
            for got, wanted in zip(grads, expected_grads):
                close(torch.from_numpy(world.allreduce(got.numpy())), wanted)


def test_one_gradient_of_stacks(world):
    for _, mm in products(world, "shared memory"):
        A, B = whole(3, 4, 5), whole(3, 5, 2, seed=1).requires_grad_()
        a, b = mm.scatter(A, B)
        (grad,) = torch.autograd.grad(mm(a, b).sum(), b)
        rows, columns = mm.slices("b", 5, 2)
        close(grad, (A.mT @ torch.ones(3, 4, 2, dtype=torch.float64))[:, rows, columns])


def test_bytes_of_a_stack_are_those_of_one_product(world):
    """Its leading dims are rows."""
    for grid, mm in products(world, "shared memory"):
        a, b = mm.scatter(whole(2, 36, 72), whole(72, 72))
        grid.transport.traffic.clear()
        mm(a, b)
        assert grid.transport.traffic.total("received") == pytest.approx(8 * mm.volume(72, 72, 72), rel=1e-12, abs=0)


class OtherArray:
    """As of a library that torch does not know."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


class Interface:
    """An array that has but the older protocol, as CuPy has __cuda_array_interface__."""

    def __init__(self, array):
        self._array = array
        self.__array_interface__ = array.__array_interface__


def test_arrays(world):
    A, B = whole(5, 7).numpy(), whole(7, 4, seed=1).numpy()
    fixed = B.copy()
    fixed.flags.writeable = False
    mm = matmul.Agarwal(Grid(tensor=world.size).tensor)
    for a, b in ((A, B), (OtherArray(A), Interface(B)), (A[::-1].copy()[::-1], fixed), (A, torch.from_numpy(B))):
        got = mm.gather_c(mm(*mm.scatter(a, b)))
        np.testing.assert_allclose(np.from_dlpack(got), A @ B, rtol=0, atol=1e-12)


REFUSED = {
    "terms": (
        (5, 7),
        (6, 4),
        r"A of shape \(5, 7\) cannot be multiplied by B of shape \(6, 4\): the last dim of A is 7, and B needs as many "
        "rows, but has 6",
    ),
    "vectors": ((3,), (2,), r"A of shape \(3,\) cannot be multiplied by B of shape \(2,\)"),
    "leading dims": (
        (2, 5, 7),
        (3, 7, 4),
        r"\(2,\) of A, of shape \(2, 5, 7\), and \(3,\) of B, of shape \(3, 7, 4\), do not broadcast: .* equal, or 1",
    ),
    "number": ((), (7, 4), "A must have one dim at least, got a single number; multiply by it with *"),
}


def test_refused(world):
    mm = matmul.Agarwal(Grid(tensor=world.size).tensor)
    for a, b, text in REFUSED.values():
        with pytest.raises(ValueError, match=text):
            mm.scatter(whole(*a), whole(*b))
    for value, text in (
        ([[1.0]], "A must be a tensor, or an array of .*, got a list: it has no array protocol"),
        (np.array([["a"]]), r"A must be .*, got a ndarray of shape \(1, 1\) and type <U1: "),
        (whole(2, 3).to_sparse(), r"A must be dense, got a tensor of torch.sparse_coo; use .to_dense\(\)"),
        (np.ones((2, 3), ">f8"), r"A must be .*, got a ndarray of shape \(2, 3\) and type >f8: "),
    ):
        with pytest.raises(ValueError, match=text):
            mm.scatter_a(value)
    mm.scatter_a(whole(2, 5, 7))
    b = mm.scatter_b(whole(2, 7, 4))
    with pytest.raises(
        ValueError, match=r"both have leading dims, .*: make the blocks together, a, b = mm\.scatter\(A, B"
    ):
        mm(b, b)
    with pytest.raises(ValueError, match="B must be of real numbers, got torch.complex64; multiply its real"):
        mm.scatter(whole(3, 4), whole(4, 5).cfloat())
    with pytest.raises(ValueError, match="A and B must have one dtype, got torch.float64 and torch.float32; convert"):
        mm(*mm.scatter(whole(3, 4), whole(4, 5).float()))
    with pytest.raises(ValueError, match="m, k and n must be at least 0, got 3, -4 and 5"):
        mm.bind(3, -4, 5)
    for axis in (mm.x, Grid(tensor=world.size)):
        with pytest.raises(ValueError, match="tensor must be the tensor axis of a grid, grid.tensor, got"):
            matmul.Agarwal(axis)


def test_a_block_of_other_sizes_is_not_gathered(world):
    """After a product of other sizes, of which a block may have as many elements."""
    mm = matmul.Agarwal(Grid(tensor=(world.size, 1, 1)).tensor)
    c = mm(mm.scatter_a(torch.ones(4, 6)), mm.scatter_b(torch.ones(6, 8)))
    mm.bind(8, 6, 4)
    with pytest.raises(ValueError, match=r"cannot be gathered from one of .*call bind\(m, k, n\)"):
        mm.gather_c(c)


def test_blocks_made_otherwise(world):
    """Arrays are taken as whole ones are; numbers that no product is of are refused."""
    A, B = whole(4, 6), whole(6, 8, seed=1)
    mm = matmul.Agarwal(Grid(tensor=(world.size, 1, 1)).tensor)
    mm.bind(4, 6, 8)
    a, b = A[mm.slices("a", 4, 6)].contiguous(), B[mm.slices("b", 6, 8)].contiguous()
    c = mm(a.numpy(), b.numpy())
    close(mm.gather_c(c.numpy()), A @ B)
    for call in (lambda: mm(a, b.cdouble()), lambda: mm(a.cdouble(), b)):
        with pytest.raises(ValueError, match="must be of real numbers, got torch.complex128; multiply its real and"):
            call()
    with pytest.raises(ValueError, match="C must be a tensor, or an array of .*, got a list"):
        mm.gather_c([1.0])


def test_blocks_are_no_views(world):
    """A rank may write to them, and the whole matrix need not stay, on every grid."""
    for _, mm in products(world, "shared memory"):
        A, B = whole(4, 6), whole(6, 8)
        kept = A.clone(), B.clone()
        for block in (mm.scatter_a(A), mm.scatter_b(B), *mm.scatter(A[None], B[None])):
            assert block.untyped_storage().nbytes() == block.nbytes
            block.zero_()
        assert torch.equal(A, kept[0])
        assert torch.equal(B, kept[1])


def test_autocast_is_refused(world):
    mm = matmul.Agarwal(Grid(tensor=world.size).tensor)
    a, b = mm.scatter(whole(4, 6).float(), whole(6, 8).float())
    with torch.autocast("cpu"), pytest.raises(ValueError, match="in the type of its blocks, got .* torch.autocast: le"):
        mm(a, b)
