"""Products of two matrices by the faster of MKL and oneDNN: as torch's, and which is taken where."""

import pytest
import torch
from layer_checks import KEY, Layout, tensor_grids, whole

from hpctrain import gemm
from hpctrain.choices import OVERLAPS
from hpctrain.data_parallel import DataParallel
from hpctrain.layers import Linear, algorithm_of

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
SHAPE = 20, 24, 16


@pytest.fixture
def precisions(monkeypatch):
    """In which torch is asked for products, on a processor whose oneDNN is faster."""
    found = []

    def recording(product):
        def asked(*given, **options):
            found.append(torch.backends.mkldnn.matmul.fp32_precision)
            return product(*given, **options)

        return asked

    for name in ("mm", "addmm"):
        monkeypatch.setattr(torch, name, recording(getattr(torch, name)))
    monkeypatch.setattr(gemm, "is_faster", lambda: True)
    monkeypatch.setattr(gemm, "PAYS", SHAPE[0] * SHAPE[1] * SHAPE[2])
    return found


def operands(m=SHAPE[0], k=SHAPE[1], n=SHAPE[2], dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(shape, generator=generator).to(dtype) for shape in ((m, k), (k, n), (m, n)))


def test_results(precisions):
    rows, columns, plus = operands()
    expected = rows.double() @ columns.double()
    out = torch.full((40, 16), torch.nan)[::2]
    for a, b in ((rows, columns), (rows.t().contiguous().t(), columns.t().contiguous().t())):
        torch.testing.assert_close(gemm.mm(a, b).double(), expected, **CLOSE)
        assert gemm.mm(a, b, out) is out
        torch.testing.assert_close(out.double(), expected, **CLOSE)
        torch.testing.assert_close(gemm.addmm(plus[0], a, b).double(), expected + plus[0], **CLOSE)
        total = plus.clone()
        assert gemm.addmm(total, a, b, out=total) is total
        torch.testing.assert_close(total.double(), expected + plus, **CLOSE)
    assert precisions == ["bf16"] * 8


@pytest.mark.parametrize(
    "given", [{"dtype": torch.float64}, {"dtype": torch.bfloat16}, {"n": 15}, {"m": 3, "k": 200}], ids=str
)
def test_what_is_left_to_torch(precisions, given):
    """Other numbers, small products, and those that wait for memory alone."""
    a, b, plus = operands(**given)
    gemm.mm(a, b)
    gemm.addmm(plus, a, b)
    assert precisions == ["none"] * 2


def test_no_rows(precisions):
    a, b, plus = operands(m=0)
    assert gemm.mm(a, b).shape == gemm.addmm(plus, a, b).shape == (0, SHAPE[2])


def test_gradients(precisions):
    a, b, plus = (each.requires_grad_() for each in operands())
    for found, expected in ((gemm.mm(a, b), a @ b), (gemm.addmm(plus, a, b), plus + a @ b)):
        for each in zip(*(torch.autograd.grad(y.square().sum(), (a, b)) for y in (found, expected))):
            torch.testing.assert_close(*each, **CLOSE)


@pytest.mark.mpi
@pytest.mark.ranks(1, 4)
@pytest.mark.parametrize("way", ["shared memory", "messages"])
@pytest.mark.parametrize("name", ["agarwal", "summa", "cannon", "two_half_d"])
def test_every_product_of_a_layer(world, precisions, monkeypatch, name, way):
    """Forward and backward, also of two backwards whose sums over ranks are one."""
    monkeypatch.setattr(gemm, "PAYS", 1)
    monkeypatch.setattr(gemm, "_VECTORS", 1)
    for grid in tensor_grids(world, way):
        t = grid.tensor
        if name != "agarwal" and (t.z.size > 1 or t.x.size != t.y.size):
            continue
        algorithm = algorithm_of(grid, name, OVERLAPS) if name == "agarwal" else name
        layer = Linear(grid, 24, 20, to="inner", algorithm=algorithm, key=KEY)
        replicas, layout = DataParallel(layer.parameters(), grid), Layout(grid, 4, 3)
        rows, seed = whole((12, 24), "x", False).float(), whole((12, 20), "seed", False).float()
        place = layout.inner if name == "agarwal" else layout.residual
        replicas.zero_grad()
        for last in (False, True):
            if last:
                replicas.enable_grad_sync()
            layer(layout.residual(rows).requires_grad_(), layout.tokens).backward(place(seed))
        replicas.finish_grad_sync()
        torch.testing.assert_close(layer.weight.grad, 2 * (seed.T @ rows)[layer.weight.shard.slices], **CLOSE)
    assert len(precisions) >= 6
    assert set(precisions) == {"bf16"}


@pytest.mark.parametrize(
    ("vendor", "vectors", "rounds", "faster"),
    [
        ("GenuineIntel", "AVX512", False, False),
        ("AuthenticAMD", "AVX512", False, True),
        ("AuthenticAMD", "AVX512", True, False),
        ("AuthenticAMD", "AVX2", False, False),
    ],
)
def test_processors_of_which_mkl_leaves_vectors_unused(monkeypatch, vendor, vectors, rounds, faster):
    monkeypatch.setattr(gemm, "_rounds", lambda: rounds)
    monkeypatch.setattr(gemm.Path, "read_text", lambda path: f"vendor_id : {vendor}\n")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: vectors)
    assert gemm.is_faster.__wrapped__() is faster


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_products_that_round_are_found(monkeypatch, default):
    """Those of a processor that has no such vectors are MKL's, and exact. Products of float64 are everywhere."""
    equal = torch.equal
    rounded = {torch.float32: torch.bfloat16}
    monkeypatch.setattr(
        torch, "equal", lambda found, exact: equal(found.to(rounded.get(found.dtype, found.dtype)).to(found), exact)
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        assert gemm._rounds()
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("precision", ["highest", "medium"])
def test_precision_of_others_products_stays(precisions, precision):
    """Also after an error."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        within = torch.backends.mkldnn.matmul.fp32_precision
        for product in (
            lambda: gemm.mm(torch.ones(99, 16), torch.ones(17, 99)),
            lambda: gemm.addmm(torch.ones(99, 99), torch.ones(99, 16), torch.ones(17, 99)),
        ):
            with pytest.raises(RuntimeError, match="cannot be multiplied"):
                product()
        assert precisions == ["bf16"] * 2
        assert torch.backends.mkldnn.matmul.fp32_precision == within
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)
