"""Layers of a unit with one input multiply it at once: as one by one, and no more than they were asked for."""

import pytest
import torch
from parallelize_checks import compare, numbers, tensor_grids
from torch import nn

import hpctrain as ht
from hpctrain.convert import linear as module
from hpctrain.convert import shared_input

transformers = pytest.importorskip("transformers")
from transformers.models.llama.modeling_llama import LlamaAttention  # noqa: E402

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 4)]


class Attention(LlamaAttention):
    """As Whisper's: of itself, or of another sequence."""

    def forward(self, hidden_states, key_value_states=None):
        others = hidden_states if key_value_states is None else key_value_states
        turned = [numbers(2, x.shape[1], 4, seed=7) for x in (hidden_states, others)]
        q, k, v = (
            layer(x).unflatten(-1, (-1, 4)).transpose(1, 2)
            for layer, x in ((self.q_proj, hidden_states), (self.k_proj, others), (self.v_proj, others))
        )
        q, k = (x * angles.cos().unsqueeze(1) for x, angles in zip((q, k), turned))
        attend = transformers.AttentionInterface()[self.config._attn_implementation]
        return self.o_proj(attend(self, q, k, v, None, scaling=self.scaling)[0].flatten(2)), None


Attention.__module__ = "transformers.other"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        config = transformers.LlamaConfig(
            hidden_size=12, num_attention_heads=6, num_key_value_heads=2, head_dim=4, attention_bias=True,
            attn_implementation="sdpa",
        )  # fmt: skip
        self.attention = Attention(config, 0)

    def forward(self, x, *others):
        return self.attention(x, *others)[0]


@pytest.fixture
def products(monkeypatch):
    """How many layers are multiplied for at a time."""
    found = []

    def counted(x, layers):
        found.append(len(layers))
        return module.linears(x, layers)

    monkeypatch.setattr(shared_input, "linears", counted)
    return found


OF_ITSELF, OF_ANOTHER = [numbers(2, 5, 12)], [numbers(2, 5, 12), numbers(2, 3, 12, seed=2)]


@pytest.mark.parametrize(("inputs", "first", "later"), [(OF_ITSELF, [3], [3]), (OF_ANOTHER, [3, 3], [1, 2])])
def test_a_call_learns_from_the_one_before(world, products, inputs, first, later):
    for grid in tensor_grids(world):
        model = compare(Model, grid, inputs)
        assert type(model.attention).__name__.startswith("Split")
        assert products == first
        products.clear()
        gradients = [weight.grad.clone() for weight in model.parameters()]
        seed = numbers(2, 5, 12, seed=5)
        for _ in range(2):
            model.zero_grad()
            (model(*inputs) * seed).sum().backward()
            assert all(torch.equal(weight.grad, g) for weight, g in zip(model.parameters(), gradients))
        assert products == 2 * later
        products.clear()


def test_what_is_broken_off_teaches_nothing(world, products):
    grid = tensor_grids(world)[0]
    model = ht.parallelize(Model().double(), grid)
    with pytest.raises(RuntimeError):
        model(OF_ANOTHER[0], numbers(2, 3, 11))  # after the queries
    products.clear()
    model(*OF_ITSELF)
    assert products == [3]


def test_without_gradients_each_by_itself(world, products):
    """As in `generate`, where keys and values of another sequence are kept; nothing is learned of a training."""
    model = ht.parallelize(Model().double(), tensor_grids(world)[0])
    with torch.no_grad():
        model(*OF_ANOTHER)
    assert not products
    model(*OF_ITSELF)
    assert products == [3]
