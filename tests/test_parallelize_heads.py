"""Attention of Hugging Face's kind is recognised by what it computes: heads are divided, or its layers alone."""

import pytest
import torch
from context_checks import use_tiles
from parallelize_checks import boxes, compare, numbers, tensor_grids
from torch import nn
from torch.nn.functional import dropout, scaled_dot_product_attention

import hpctrain as ht
from hpctrain.convert.box import BoxDown
from hpctrain.convert.tiled_attention import TiledAttention

transformers = pytest.importorskip("transformers")
from transformers.models.llama.modeling_llama import LlamaAttention  # noqa: E402

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3, 4)]


def after(change):
    """Llama's attention, with something done to what it gives."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
        out, weights = LlamaAttention.forward(self, hidden_states, position_embeddings, attention_mask, **kwargs)
        return change(self, out), weights

    return forward


def weighted_by_index(self, hidden_states, position_embeddings=None, attention_mask=None):
    """Heads that are told by their number."""
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    q, k, v = (layer(hidden_states).view(shape).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
    q = q * torch.arange(1, q.shape[1] + 1).view(-1, 1, 1)
    attend = transformers.AttentionInterface()[self.config._attn_implementation]
    mixed, _ = attend(self, q, k, v, attention_mask, scaling=self.scaling)
    return self.o_proj(mixed.flatten(2)), None


def dropping(self, hidden_states, position_embeddings=None, attention_mask=None):
    """Dropout of what is neither probabilities nor the output: it would draw for the heads that it is given."""
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    q, k, v = (layer(hidden_states).view(shape).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
    attend = transformers.AttentionInterface()[self.config._attn_implementation]
    mixed, _ = attend(self, q, k, v, attention_mask, scaling=self.scaling)
    return self.o_proj(torch.nn.functional.dropout(mixed.flatten(2), 0.3, self.training)), None


FORWARDS = {  # what: (forward, whether heads are divided)
    "as it is": (LlamaAttention.forward, True),
    "doubled": (after(lambda self, out: 2 * out), True),
    "squared": (after(lambda self, out: out.square()), False),
    "with a weight read": (after(lambda self, out: out + self.o_proj.weight.sum()), False),
    "with a bias read": (after(lambda self, out: out + self.o_proj.bias), False),
    "with random numbers": (after(lambda self, out: out * (1 + torch.rand(()))), False),
    "heads told by number": (weighted_by_index, False),
    "with dropout of all heads' features": (dropping, False),
}


class Model(nn.Module):
    def __init__(self, forward):
        super().__init__()
        config = transformers.LlamaConfig(
            hidden_size=12,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=4,
            attention_bias=True,
            attn_implementation="sdpa",
        )
        kind = type("OtherAttention", (LlamaAttention,), {"forward": forward, "__module__": "transformers.other"})
        self.attention = kind(config, 0)

    def forward(self, x):
        turned = numbers(2, 5, 4, seed=7)
        return self.attention(x, position_embeddings=(turned.cos(), turned.sin()), attention_mask=None)[0]


@pytest.mark.parametrize("case", FORWARDS)
def test_attention(world, case):
    forward, divided = FORWARDS[case]
    for grid in tensor_grids(world):
        model = compare(lambda: Model(forward), grid, [numbers(2, 5, 12)])
        assert type(model.attention).__name__.startswith("Split") == divided


def test_causal_attention_by_tiles(world, monkeypatch):
    kinds = use_tiles(monkeypatch)
    for grid in tensor_grids(world):
        compare(lambda: Model(LlamaAttention.forward), grid, [numbers(2, 5, 12)])
        assert set(kinds) == {"causal", "full"}
        kinds.clear()


@pytest.mark.parametrize(
    ("keys", "values", "options"),
    [
        ((2, 4, 9, 4), (2, 4, 9, 4), {"is_causal": True}),  # of another sequence
        ((2, 4, 6, 4), (2, 4, 6, 3), {"is_causal": True}),
        ((1, 4, 6, 4), (1, 4, 6, 4), {"is_causal": True}),
        ((2, 4, 6, 4), (2, 4, 6, 4), {}),
        ((2, 4, 6, 4), (2, 4, 6, 4), {"attn_mask": torch.eye(6, dtype=torch.bool)}),
    ],
)
def test_attention_that_is_left_to_torch(world, monkeypatch, keys, values, options):
    q, k, v = numbers(2, 4, 6, 4), numbers(*keys, seed=2), numbers(*values, seed=3)
    kinds, expected = use_tiles(monkeypatch), scaled_dot_product_attention(q, k, v, **options)
    for grid in tensor_grids(world):
        with TiledAttention(grid):
            assert torch.equal(scaled_dot_product_attention(q, k, v, **options), expected)
        assert not kinds


class Vision(nn.Module):
    """Attention as of timm's ViT: of one fused projection, with one result."""

    def __init__(self, heads):
        super().__init__()
        self.num_heads, self.head_dim, self.attn_dim = heads, 4, 4 * heads
        self.qkv, self.proj = nn.Linear(12, 12 * heads), nn.Linear(4 * heads, 12)
        self.q_norm, self.attn_drop, self.proj_drop = nn.LayerNorm(4), nn.Dropout(0.25), nn.Dropout(0.1)

    def forward(self, x, attn_mask=None):
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        dropped = self.attn_drop.p if self.training else 0.0
        x = scaled_dot_product_attention(self.q_norm(q), k, v, attn_mask=attn_mask, dropout_p=dropped)
        return self.proj_drop(self.proj(x.transpose(1, 2).reshape(batch, length, self.attn_dim)))


class Wider(Vision):
    """An argument that nobody knows."""

    def forward(self, x, scale=2.0):
        return super().forward(scale * x)


@pytest.mark.parametrize("shards", [False, True])
def test_attention_of_others(world, shards):
    """Uneven heads; on a box where each rank has some; masks by head and learned."""
    for grid in boxes(world):
        inputs = [numbers(2, 5, 12), numbers(2, 6, 5, 5, seed=2)]
        model = compare(lambda: Vision(6), grid, inputs, shard_activations=shards)
        assert type(model).__name__ == "SplitVision"
        assert isinstance(model.proj, BoxDown) == (shards and grid.tensor.z.size > 1)
    compare(lambda: Vision(3), grid, inputs[:1], shard_activations=shards)  # a rank of four has none
    assert type(compare(lambda: Wider(6), grid, inputs[:1])).__name__ == "Wider"


class OfDiffusers(nn.Module):
    """As the attention of diffusers: another object computes, the projection back is in a list, and nothing but the
    number of heads tells their width."""

    __module__ = "diffusers.models.attention"

    def __init__(self, scale=False):
        super().__init__()
        self.to_q, self.to_k, self.to_v = nn.Linear(12, 12), nn.Linear(12, 12, bias=False), nn.Linear(12, 12)
        self.to_out, self.heads, self.scale = nn.ModuleList([nn.Linear(12, 12), nn.Dropout(0.2)]), 3, scale
        self.processor = _process

    def forward(self, hidden_states, encoder_hidden_states=None, attention_mask=None, **others):
        return self.processor(self, hidden_states, encoder_hidden_states, attention_mask)


def _process(layer, x, others, mask):
    others = x if others is None else others
    made = layer.to_q(x), layer.to_k(others), layer.to_v(others)
    q, k, v = (y.unflatten(-1, (layer.heads, y.shape[-1] // max(1, layer.heads))).transpose(1, 2) for y in made)
    scores = q @ k.transpose(-1, -2) + (0 if mask is None else mask)
    y = (dropout(scores.softmax(-1), 0.2, layer.training) @ v).transpose(1, 2).flatten(2)
    y = layer.to_out[1](layer.to_out[0](y))
    return y * y.shape[1] + x if layer.scale else y


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("scale", [False, True])
def test_attention_of_diffusers(world, scale):
    """With dropout of probabilities, and a mask for each head."""
    grid, mask = ht.Grid(tensor=world.size), numbers(2, 3, 5, 4, seed=3)
    inputs = [numbers(2, 5, 12), numbers(2, 4, 12, seed=2), mask]
    for given in (inputs[:1], inputs):
        model = compare(lambda: OfDiffusers(scale), grid, given)
        assert (model.to_q.leaves, model.to_out[0].enters) == (scale, scale)


class OfTwoStreams(OfDiffusers):
    """Gives something else as its second result, as CogVideoX's does."""

    def forward(self, hidden_states, encoder_hidden_states=None, **others):
        return self.processor(self, hidden_states, None, None), hidden_states * 2


class NormedOthers(OfDiffusers):
    """A norm that is run for another sequence alone, of another width than the tiny twin's."""

    def __init__(self):
        super().__init__()
        self.norm_cross = nn.LayerNorm(12)

    def forward(self, hidden_states, encoder_hidden_states=None, **others):
        if encoder_hidden_states is not None:
            encoder_hidden_states = self.norm_cross(encoder_hidden_states)
        return self.processor(self, hidden_states, encoder_hidden_states, None)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [OfTwoStreams, NormedOthers])
def test_attention_that_is_not_seen_through(world, kind):
    model = compare(kind, ht.Grid(tensor=2), [numbers(2, 5, 12), numbers(2, 4, 12, seed=2)])
    assert model.to_q.leaves
