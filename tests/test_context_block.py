"""Tiles by each kernel and their merging, on one rank."""

import math

import pytest
import torch
import torch.nn.functional as F
from context_checks import KEY

from hpctrain import Grid
from hpctrain.layers.context.block import Block, CpuFlash, CudaEfficient, CudaFlash, Explicit, kernels_of
from hpctrain.layers.context.mask import Mask
from hpctrain.layers.context.merge import Merged
from hpctrain.layers.context.ring import RingAttention
from hpctrain.layers.context.tiles import Tile

TILES = {
    "full": Tile(slice(0, 20), slice(0, 33)),
    "causal": Tile(slice(0, 20), slice(0, 20), None, 0),
    "masked": Tile(slice(0, 20), slice(0, 33), 0, 13),
}


def normal(name, *shape, dtype=torch.float64):
    return (KEY / name).normal(0, math.prod(shape)).view(shape).to(dtype)


@pytest.mark.parametrize("kernel", [CpuFlash, Explicit])
@pytest.mark.parametrize("kind", TILES)
def test_kernels(kernel, kind):
    tile = TILES[kind]
    rows, keys = tile.shape
    q, k, v = normal("q", 2, 6, rows, 8), normal("k", 2, 3, keys, 8), normal("v", 2, 3, keys, 8)
    grad = normal("grad", 2, 6, rows, 8)
    offset = torch.arange(keys)[None] - torch.arange(rows)[:, None]
    least, greatest = (
        bound if given is None else given for bound, given in ((-rows, tile.least), (keys, tile.greatest))
    )
    seen = (offset >= least) & (offset <= greatest)
    leaves = [part.clone().requires_grad_() for part in (q, k, v)]
    many = [part.repeat_interleave(2, 1) for part in leaves[1:]]
    scores = (leaves[0] @ many[0].mT * 0.3).masked_fill(~seen, -math.inf)
    expected = scores.softmax(-1) @ many[1]
    expected.backward(grad)

    block = Block(q, k, v, tile, 0.3)
    out, lse = kernel.forward(block)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-12, atol=1e-12)
    for found, leaf in zip(kernel.backward(block, grad, out, lse), leaves):
        torch.testing.assert_close(found, leaf.grad, rtol=1e-12, atol=1e-12)


def test_which_kernel_takes_what():
    assert set(kernels_of("cpu", torch.float64, 7, False).values()) == {CpuFlash}
    assert set(kernels_of("cpu", torch.float32, 8, True).values()) == {Explicit}
    on_gpu = kernels_of("cuda", torch.bfloat16, 64, False)
    assert on_gpu == {"full": CudaFlash, "causal": CudaFlash, "masked": CudaEfficient}
    assert set(kernels_of("cuda", torch.float32, 64, False).values()) == {CudaEfficient}
    assert set(kernels_of("cuda", torch.float64, 64, False).values()) == {Explicit}


def test_merged_is_attention_over_all_keys_and_queries_without_keys_stay_empty():
    q, k, v = (normal(name, 1, 2, 30, 8) for name in "qkv")
    merged = Merged(q)
    for start in range(0, 30, 10):
        tile = Tile(slice(0, 20), slice(start, start + 10))
        block = Block(q[:, :, :20], k[:, :, tile.keys], v[:, :, tile.keys], tile, 0.5)
        merged.add((slice(None), slice(None), tile.queries), *Explicit.forward(block))
    expected = F.scaled_dot_product_attention(q, k, v, scale=0.5)
    torch.testing.assert_close(merged.out[:, :, :20], expected[:, :, :20], rtol=1e-13, atol=1e-13)
    assert (merged.out[:, :, 20:] == 0).all()
    assert (merged.lse[:, :, 20:] == -math.inf).all()
    none = torch.full((1, 2, 10), -math.inf, dtype=torch.float64)
    merged.add((slice(None), slice(None), slice(20, 30)), torch.zeros(1, 2, 10, 8, dtype=torch.float64), none)
    assert (merged.out[:, :, 20:] == 0).all()
    assert (merged.lse[:, :, 20:] == -math.inf).all()


def test_many_merges_of_16_bit_outputs_round_once():
    """256 times the same: in bfloat16 each merge would round."""
    q = torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16)
    merged, everywhere = Merged(q), (slice(None),) * 3
    parts = normal("parts", 256, 8, dtype=torch.bfloat16)
    for part in parts:
        merged.add(everywhere, part.view(1, 1, 1, 8), torch.zeros(1, 1, 1))
    torch.testing.assert_close(merged.out.flatten(), parts.float().mean(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(merged.lse.flatten(), torch.tensor([math.log(256)]), rtol=1e-5, atol=0)


@pytest.mark.mpi
@pytest.mark.ranks(1, 2)
def test_gradients_of_16_bit_floats_are_summed_in_float32(world):
    grid = Grid(data=(1, world.size, 1))
    spans = tuple((range(40 * rank, 40 * rank + 40),) for rank in range(world.size))
    masks, groups = ((slice(0, 1), Mask(False)),), ((slice(0, 2), slice(0, 1)),)
    ring = RingAttention(grid.ring, spans, 40 * world.size, masks, groups, 0.3)
    q, grad = (normal(f"{name}{world.rank}", 1, 2, 40, 8, dtype=torch.bfloat16) for name in ("q", "grad"))
    kv = normal("kv", 2, 1, 1, 40, 8, dtype=torch.bfloat16)
    found = ring.forward(q, kv)
    dq, dkv = ring.backward(q, kv, found.out.bfloat16(), found.lse, grad)
    assert dq.dtype == dkv.dtype == found.out.dtype == torch.float32
    if world.size > 1:  # sums of 16-bit floats that 16 bits do not hold
        assert (dkv != dkv.bfloat16()).any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", TILES)
def test_kernels_of_gpus(kind, dtype):
    tile = TILES[kind]
    rows, keys = tile.shape
    q, k, v = normal("q", 2, 6, rows, 16), normal("k", 2, 3, keys, 16), normal("v", 2, 3, keys, 16)
    grad = normal("grad", 2, 6, rows, 16)
    wide = Block(q, k, v, tile, 0.3)
    out, lse = Explicit.forward(wide)
    expected = [out, lse, *Explicit.backward(wide, grad, out, lse)]
    block = Block(*(part.to("cuda", dtype) for part in (q, k, v)), tile, 0.3)
    kernel = kernels_of("cuda", dtype, 16, False)[kind]
    out, lse = kernel.forward(block)
    found = [out, lse, *kernel.backward(block, grad.to("cuda", dtype), out, lse)]
    rtol = 1e-5 if dtype == torch.float32 else 3e-2
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours.cpu().double(), theirs, rtol=rtol, atol=rtol)
