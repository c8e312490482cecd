"""Layers that are divided together, called by themselves: refused, where they would take or give parts of features. And
what they keep for code outside, which is whole."""

import copy

import pytest
import torch
import torch.nn.functional as F
from parallelize_checks import compare, numbers
from torch import nn
from torch.utils.checkpoint import checkpoint

import hpctrain as ht

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2)]
WIDTH = 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class AutoEncoder(nn.Module):
    """As in torch's examples: whoever draws samples calls `decode`."""

    def __init__(self):
        super().__init__()
        self.first, self.mean, self.width = nn.Linear(WIDTH, 12), nn.Linear(12, 3), nn.Linear(12, 3)
        self.up, self.down = nn.Linear(3, 12), nn.Linear(12, WIDTH)

    def encode(self, x):
        hidden = F.relu(self.first(x))
        return self.mean(hidden), self.width(hidden)

    def decode(self, z):
        hidden = F.relu(self.up(z))
        return torch.sigmoid(self.down(hidden))

    def forward(self, x):
        mean, width = self.encode(x)
        return self.decode(mean + width.exp())


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj, self.num_heads, self.head_dim = nn.Linear(8, 24), nn.Linear(8, 8), 2, 4

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def bert():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=16)
    return transformers.BertModel(config).encoder.layer[0]


def gpt2():
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2Model(transformers.GPT2Config(vocab_size=9, n_embd=8, n_head=2, n_layer=1)).h[0].mlp


LAYERS = {
    "a block": (Block, "up", WIDTH),
    "a pair of a module": (AutoEncoder, "up", 3),
    "attention": (Attention, "qkv", 8),
    "a layer of torch": (lambda: nn.TransformerEncoderLayer(8, 2, 16), "linear1", 8),
    "its dropout": (lambda: nn.TransformerEncoderLayer(8, 2, 16), "dropout", 16),
    "bert": (bert, "intermediate", 8),
    "gpt-2": (gpt2, "c_fc", 8),
}


@pytest.mark.parametrize("what", LAYERS)
def test_a_layer_by_itself(world, what):
    make, path, width = LAYERS[what]
    torch.manual_seed(0)
    model = ht.parallelize(make(), ht.Grid(tensor=2), check_steps=0)
    with pytest.raises(ValueError, match=f"{path}[a-z.]* was called by itself, but .* or list '.*' in replicate"):
        model.get_submodule(path)(torch.ones(2, 3, width))


@pytest.mark.parametrize("sharded", [False, True])
def test_on_a_box(world, sharded):
    torch.manual_seed(0)
    model = ht.parallelize(Block(), ht.Grid(tensor=(1, 1, 2)), check_steps=0, shard_activations=sharded)
    x = torch.ones(2, 3, WIDTH)
    model(x)
    with pytest.raises(ValueError, match="up was called by itself"):
        model.up(x)


class KeepingBlock(Block):
    def forward(self, x):
        self.kept = self.up(x)
        return self.down(F.gelu(self.kept))


class Recording(Block):
    def __init__(self):
        super().__init__()
        self.kept = []

    def forward(self, x):
        self.kept.append(self.up(x))
        return self.down(F.gelu(self.kept[-1]))


class KeepingAttention(Attention):
    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        weights = (q @ k.mT).softmax(-1)
        if not self.training:
            self.kept = {"weights": weights}
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


KEEPING = {
    "a block": (KeepingBlock, WIDTH, lambda model: model.kept),
    "a list": (Recording, WIDTH, lambda model: torch.stack(model.kept)),
    "attention": (lambda: KeepingAttention().eval(), 8, lambda model: model.kept["weights"]),
}


@pytest.mark.parametrize("what", KEEPING)
def test_what_a_forward_keeps(world, what):
    """Activations in attributes, as penalties and pictures of attention take them."""
    make, width, kept = KEEPING[what]
    compare(make, ht.Grid(tensor=2), [numbers(2, 3, width)], run=lambda model, x: (model(x), kept(model)))


class Counting(Attention):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def test_looking_at_a_module_leaves_its_buffers(world):
    model = compare(Counting, ht.Grid(tensor=2), [numbers(2, 3, 8)])
    assert not model.qkv.leaves


def test_a_method_beside_forward(world):
    """Is the unit of its pair, whoever calls it."""
    model = compare(AutoEncoder, ht.Grid(tensor=2), [numbers(5, WIDTH)])
    assert not model.up.leaves
    assert model.first.leaves
    compare(AutoEncoder, ht.Grid(tensor=2), [numbers(5, 3)], run=lambda model, z: model.decode(z))


def test_after_an_error(world):
    """A unit that failed is not called any more; one that is called by itself is."""
    torch.manual_seed(0)
    model = ht.parallelize(Block(), ht.Grid(tensor=2), check_steps=0)
    for wrong in (model, copy.deepcopy(model)):
        with pytest.raises(RuntimeError):
            wrong(torch.ones(2, WIDTH + 1))
        with pytest.raises(ValueError, match="up was called by itself"):
            wrong.up(torch.ones(2, WIDTH))


class Checkpointed(Block):
    def forward(self, x):
        return self.down(F.gelu(checkpoint(self.up, x, use_reentrant=False)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_computed_again(world, reentrant):
    """A layer within its unit, and a unit."""
    assert not compare(Checkpointed, ht.Grid(tensor=2), [numbers(5, WIDTH)]).up.leaves
    run = lambda model, x: checkpoint(model, x, use_reentrant=reentrant)  # noqa: E731
    compare(Block, ht.Grid(tensor=2), [numbers(5, WIDTH)], run)


def test_the_layer_down_by_itself(world):
    torch.manual_seed(0)
    model = ht.parallelize(Block(), ht.Grid(tensor=2), check_steps=0)
    with pytest.raises(ValueError, match="down was called by itself"):
        model.down(torch.ones(2, 9))


@pytest.mark.ranks(1)
def test_one_rank(world):
    """Has all features."""
    model = ht.parallelize(Block(), ht.Grid(tensor=1))
    assert model.up(torch.ones(2, WIDTH)).shape == (2, 9)
