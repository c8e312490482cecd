"""ht.parallelize(shard_activations=True): the bytes that ranks receive, and the elements kept for backward."""

import pytest
import torch
from parallelize_checks import numbers
from test_parallelize_activations import BOXES, SHARDED, Block
from test_parallelize_transformers import llama
from torch import nn

import hpctrain as ht
from hpctrain.convert.gathering_again import _Again

pytestmark = pytest.mark.mpi


@pytest.mark.ranks(2, 4)
def test_bytes_of_a_block(world):
    """They are those of Agarwal's products on the box, but for features that tokens have whole between blocks."""
    for box in BOXES[world.size]:
        (x, y, z), t, tokens, wide, hidden = box, world.size, 8, 8, 16
        grid = ht.Grid(tensor=box)
        received = [_received(blocks, grid, tokens) for blocks in (2, 3)]
        narrow = tokens * wide * (1 / (y * z) - 1 / (t * y))  # where y = 1, those of Agarwal's
        up, down = ht.matmul.Agarwal(grid.tensor), tokens * hidden * (1 - 1 / y) / (x * z)
        weights = wide * hidden * (1 - 1 / z) / (x * y)
        if y == 1:
            assert up.volume(hidden, wide, tokens) == narrow + weights
            assert up.volume_backward(hidden, wide, tokens) == 2 * (narrow + weights)
        products = 5 * (narrow + down) + 6 * weights
        biases = wide * (1 - 1 / t) + hidden * (1 / (x * y) - 1 / t) if x < t else 0
        norms, gain = 4 * wide * (1 - 1 / t), 2 * wide * (1 - 1 / t)
        assert received[1] - received[0] == 8 * (products + 2 * biases + norms + gain), box


def _received(blocks, grid, rows):
    torch.manual_seed(0)
    model = ht.parallelize(nn.Sequential(*(Block() for _ in range(blocks))).double(), grid, check_steps=0, **SHARDED)
    grid.transport.traffic.clear()
    model(numbers(rows, 8)).sum().backward()
    return grid.transport.traffic.total("received")


@pytest.mark.ranks(4)
def test_bytes_of_a_layer(world):
    """Of Llama, on boxes: attention goes from tokens over z to heads over x, y and z, and back."""
    tokens, wide, hidden = 16, 16, 32
    sizes = {"hidden_size": wide, "intermediate_size": hidden, "num_attention_heads": 4, "num_key_value_heads": 4}
    for x, y, z in BOXES[world.size][1:]:
        grid, received, t = ht.Grid(tensor=(x, y, z)), [], world.size
        for layers in (2, 3):
            made = llama(num_hidden_layers=layers, **sizes).double()
            model = ht.parallelize(made, grid, check_steps=0, **SHARDED)
            grid.transport.traffic.clear()
            model(torch.arange(tokens).view(2, 8)).logits.sum().backward()
            received.append(grid.transport.traffic.total("received"))
        narrow = tokens * wide * (1 / (y * z) - 1 / (t * y))
        to_heads, from_heads = tokens * wide * (y - 1 / z) / t, tokens * wide * (1 / x - 1 / t) / z
        attention = 5 * narrow + 3 * (to_heads + from_heads) + to_heads + 2 * from_heads
        feed_forward = 5 * narrow + (2 * 2 + 3) * tokens * hidden * (1 - 1 / y) / (x * z)
        weights = 3 * (4 * wide * wide + 3 * wide * hidden) * (1 - 1 / z) / (x * y)
        norms = 2 * 2 * wide * (1 - 1 / t)
        assert received[1] - received[0] == 8 * (attention + feed_forward + weights + norms), (x, y, z)


@pytest.mark.ranks(2, 4)
def test_elements_kept(world, monkeypatch):
    """Of a block: 1 / t of what the norm, the product up, relu, the product down, dropout and the gain keep."""
    grid, found = ht.Grid(tensor=world.size), {}

    def note(x):
        found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // 8
        return x

    def pack(self, x, pack=_Again.pack):
        note(self.source)
        return pack(self, x)

    monkeypatch.setattr(_Again, "pack", pack)
    elements = []
    for blocks in (2, 3):
        model = ht.parallelize(nn.Sequential(*(Block() for _ in range(blocks))).double(), grid, **SHARDED)
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        found.clear()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            y = model(numbers(16, 8))
        elements.append(sum(size for pointer, size in found.items() if pointer not in weights))
        del y
    share = 1 / grid.tensor.size
    # input and output of the norm, mask and product with it; relu's output, once. Statistics and weights of the norm.
    assert elements[1] - elements[0] == 16 * (4 * 8 + 16) * share + 2 * 16 * share + 2 * 8
