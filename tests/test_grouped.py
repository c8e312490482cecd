"""Products of rows that are sorted by expert, by every kernel, and which kernel is taken where."""

import pytest
import torch

from hpctrain import gemm
from hpctrain.layers.experts import grouped

COUNTS = [41, 0, 7, 1, 0, 83]


@pytest.mark.parametrize("kernel", ["mm", "onednn", "grouped_mm"])
@pytest.mark.parametrize("counts", [COUNTS, [83], [64], [0], [5, 1]], ids=str)
def test_products_of_each_expert(monkeypatch, kernel, counts):
    """Numbers of rows that oneDNN has a kernel for and those that it has none for, the last ones among them; few rows,
    and experts without any."""
    monkeypatch.setattr(grouped, "choose", lambda rows, weight: kernel)
    monkeypatch.setattr(gemm, "PAYS", 20 * 24 * 16)
    generator = torch.Generator().manual_seed(0)
    rows, grad = (torch.randn(sum(counts), width, generator=generator) for width in (16, 24))
    weight = torch.randn(len(counts), 24, 16, generator=generator)
    forward, backward = (torch.cat(parts) for parts in zip(*(
        (x @ w.T, g @ w) for x, g, w in zip(rows.split(counts), grad.split(counts), weight)
    )))  # fmt: skip
    gradient = torch.stack([g.T @ x for x, g in zip(rows.split(counts), grad.split(counts))])
    for found, expected in (
        (grouped.products(rows, weight, counts, transposed=True), forward),
        (grouped.products(grad, weight, counts, transposed=False), backward),
        (grouped.weight_gradients(grad, rows, counts, torch.full_like(weight, torch.nan)), gradient),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    out = torch.full_like(forward, torch.nan)
    assert grouped.products(rows, weight, counts, transposed=True, out=out) is out
    torch.testing.assert_close(out, forward, rtol=1e-5, atol=1e-5)


class On:
    """What `choose` asks of a tensor."""

    def __init__(self, device, dtype, *shape):
        self.is_cpu, self.is_cuda, self.device, self.dtype = device == "cpu", device == "cuda", device, dtype
        self.itemsize, self.shape = dtype.itemsize, shape


@pytest.mark.parametrize(
    ("device", "dtype", "ffn", "capability", "faster", "kernel"),
    [
        ("cuda", torch.bfloat16, 64, (9, 0), False, "grouped_mm"),
        ("cuda", torch.bfloat16, 64, (12, 0), True, "grouped_mm"),
        ("cuda", torch.bfloat16, 64, (8, 9), False, "mm"),  # torch has a loop there
        ("cuda", torch.bfloat16, 60, (9, 0), False, "mm"),  # rows of 120 bytes, which are no multiple of 16
        ("cuda", torch.bfloat16, 0, (9, 0), False, "mm"),  # a rank without features
        ("cuda", torch.float32, 64, (9, 0), True, "mm"),
        ("cpu", torch.float32, 60, None, True, "onednn"),
        ("cpu", torch.float32, 64, None, False, "mm"),
        ("cpu", torch.float64, 64, None, True, "mm"),
        ("cpu", torch.bfloat16, 64, None, True, "mm"),
    ],
)
def test_the_kernel_that_is_taken(monkeypatch, device, dtype, ffn, capability, faster, kernel):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(gemm, "is_faster", lambda: faster)
    assert grouped.choose(On(device, dtype, 10, 32), On(device, dtype, 4, ffn, 32)) == kernel


@pytest.mark.parametrize("precision", ["highest", "medium"])
def test_precision_of_others_products_stays(monkeypatch, precision):
    monkeypatch.setattr(grouped, "choose", lambda rows, weight: "onednn")
    monkeypatch.setattr(gemm, "PAYS", 20 * 24 * 16)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        within = torch.backends.mkldnn.matmul.fp32_precision
        grouped.products(torch.ones(83, 16), torch.ones(2, 24, 16), [80, 3], transposed=True)
        grouped.weight_gradients(torch.ones(83, 24), torch.ones(83, 16), [80, 3], torch.empty(2, 24, 16))
        assert torch.backends.mkldnn.matmul.fp32_precision == within
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)
