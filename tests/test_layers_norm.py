"""Norms against torch's own, on every tensor grid of the ranks there are."""

import pytest
import torch
import torch.nn.functional as F
from layer_checks import DOUBLE, KEY, Layout, check, randomise, tensor_grids, weights_of, whole

from hpctrain import Grid
from hpctrain.layers import LayerNorm, RMSNorm
from hpctrain.layers.norm import HeadNorm

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("width", [16, 7, 1])
def test_layer_norm(world, width, bias):
    for grid in tensor_grids(world):
        layout = Layout(grid, 3, 5)
        layer = randomise(LayerNorm(grid, width, bias=bias, key=KEY, **DOUBLE))

        def serial(w, x):
            return F.layer_norm(x, (width,), w["weight"], w.get("bias"), 1e-5)

        far = whole((15, width), "x", False) + 1000  # a plain sum of squares would cancel
        expected = serial(weights_of(grid, layer), far)
        y = layer(layout.residual(far), layout.tokens)
        torch.testing.assert_close(y, layout.residual(expected).detach(), rtol=1e-9, atol=1e-9)

        check(layout, layer, serial, whole((15, width), "x"), layout.residual, layout.residual)


@pytest.mark.parametrize("eps", [None, 1e-2])
@pytest.mark.parametrize("width", [16, 7, 1])
def test_rms_norm(world, width, eps):
    for grid in tensor_grids(world):
        layout = Layout(grid, 3, 5)
        layer = randomise(RMSNorm(grid, width, eps, key=KEY, **DOUBLE))

        def serial(w, x):
            return F.rms_norm(x, (width,), w["weight"], eps)

        check(layout, layer, serial, whole((15, width), "x"), layout.residual, layout.residual)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rms_norm_in_half_precision_is_as_good_as_torch_s(world, dtype):
    """Values whose squares are below what float16 holds, and more of them than bfloat16 can count."""
    width = 600
    x = (whole((4, width), "x", False) * 1e-3).to(dtype)
    expected = torch.nn.RMSNorm(width, dtype=dtype)(x).detach()
    for grid in tensor_grids(world):
        layout = Layout(grid, 2, 2)
        y = RMSNorm(grid, width, key=KEY, dtype=dtype)(layout.residual(x), layout.tokens)
        torch.testing.assert_close(y.detach(), layout.residual(expected), rtol=2 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norm_of_heads_in_half_precision_is_as_good_as_torch_s(world, dtype):
    width = 600
    x = (whole((8, width), "x", False) * 1e-3).to(dtype)
    expected = torch.nn.RMSNorm(width, dtype=dtype)(x).detach()
    y = HeadNorm(Grid(tensor=world.size), width, key=KEY, dtype=dtype)(x.view(2, 4, width))
    torch.testing.assert_close(y.detach().view(8, width), expected, rtol=2 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layer_norm_over_y_in_half_precision_is_that_in_float32_rounded(world, dtype):
    """Forward and backward, of values far from zero, whose mean 16 bits do not hold."""
    width, eps = 600, torch.finfo(dtype).eps
    far, seed = (whole((8, width), "x", False) + 30).to(dtype), whole((8, width), "seed", False).to(dtype)
    x, weight = far.float().requires_grad_(), torch.ones(width, requires_grad=True)
    expected = F.layer_norm(x, (width,), weight)
    expected.backward(seed.float())
    for grid in (grid for grid in tensor_grids(world) if grid.tensor.y.size > 1):  # on one rank it is torch's own
        layout = Layout(grid, 2, 4)
        layer = LayerNorm(grid, width, key=KEY, dtype=dtype)
        block = layout.residual(far).clone().requires_grad_()
        y = layer(block, layout.tokens)
        y.backward(layout.residual(seed))
        torch.testing.assert_close(y.float(), layout.residual(expected).detach(), rtol=eps, atol=1e-5)
        torch.testing.assert_close(block.grad.float(), layout.residual(x.grad), rtol=eps, atol=1e-5)
        if grid.tensor.x.size * grid.tensor.z.size == 1:  # the gradient of the weight is whole
            torch.testing.assert_close(layer.weight.grad.float(), weight.grad[layer.weight.shard.slices],
                                       rtol=eps, atol=1e-5)  # fmt: skip


def test_rms_norm_sums_one_number_a_row(world):
    grid = Grid(tensor=(1, world.size, 1))
    layout = Layout(grid, 2, 3)
    layer = RMSNorm(grid, 10, key=KEY, **DOUBLE)
    grid.transport.traffic.clear()
    y = layer(layout.residual(whole((6, 10), "x")), layout.tokens)
    y.backward(torch.ones_like(y))
    expected = {("y", "all_reduce"): 2 * 2 * (world.size - 1) * 6 * 8 // world.size} if world.size > 1 else {}
    assert {cell: counts["received"] for cell, counts in grid.transport.traffic.table().items()} == expected
