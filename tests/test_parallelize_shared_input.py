"""Layers of a unit with one input multiply it at once: as one by one, and no more than they were asked for."""

import pytest
import torch
from parallelize_checks import compare, numbers, tensor_grids
from torch import nn
from torch.utils.checkpoint import checkpoint

import hpctrain as ht
from hpctrain.convert import boundary_products, linear, shared_input

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
    def __init__(self, kind):
        super().__init__()
        config = transformers.LlamaConfig(
            hidden_size=12, num_attention_heads=6, num_key_value_heads=2, head_dim=4, attention_bias=True,
            attn_implementation="sdpa",
        )  # fmt: skip
        self.attention = kind(config, 0)

    def forward(self, x, *others):
        return self.attention(x, *others)[0]


@pytest.fixture
def products(monkeypatch):
    """How many layers are multiplied for at a time."""
    found = []

    def counted(function):
        def call(x, layers, *axis):
            found.append(len(layers))
            return function(x, layers, *axis)

        return call

    monkeypatch.setattr(shared_input, "entering", counted(boundary_products.entering))
    monkeypatch.setattr(shared_input, "linears", counted(linear.linears))
    return found


OF_ITSELF, OF_ANOTHER = [numbers(2, 5, 12)], [numbers(2, 5, 12), numbers(2, 3, 12, seed=2)]


class OfItself(Attention):
    def forward(self, hidden_states):
        return super().forward(hidden_states)


OfItself.__module__ = "transformers.other"


@pytest.mark.parametrize(
    ("kind", "inputs", "expected"),
    [(OfItself, OF_ITSELF, [3]), (Attention, OF_ITSELF, [1, 2]), (Attention, OF_ANOTHER, [1, 2])],
)
def test_projections(world, products, kind, inputs, expected):
    for grid in tensor_grids(world):
        model = compare(lambda: Model(kind), grid, inputs)
        assert type(model.attention).__name__.startswith("Split")
        assert products == expected
        products.clear()


def test_a_call_that_was_broken_off(world, products):
    grid = tensor_grids(world)[0]
    torch.manual_seed(3)
    model = ht.parallelize(Model(Attention).double(), grid)
    expected = model(*OF_ITSELF)
    with pytest.raises(RuntimeError):
        model(OF_ITSELF[0], numbers(2, 3, 11))  # after the queries
    assert torch.equal(model(*OF_ITSELF), expected)


def test_without_gradients_each_by_itself(world, products):
    """As in `generate`, where keys and values of another sequence are kept."""
    model = ht.parallelize(Model(OfItself).double(), tensor_grids(world)[0])
    with torch.no_grad():
        y = model(*OF_ITSELF)
    assert products == [1, 1, 1]
    torch.testing.assert_close(model(*OF_ITSELF), y, rtol=1e-12, atol=1e-12)
    assert products == [1, 1, 1, 3]


class Twice(nn.Module):
    """Calls one of its layers twice, and changes what it makes in place."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(4, 7), nn.Linear(4, 7), nn.Linear(7, 4)

    def forward(self, x):
        return self.out(self.a(x).mul_(2) * self.b(x).add_(1) + self.a(x).sigmoid())


@pytest.mark.parametrize("recompute", [False, True])
def test_a_layer_that_is_called_twice(world, products, recompute):
    def run(model, x):
        return checkpoint(model, x, use_reentrant=False) if recompute else model(x)

    compare(Twice, tensor_grids(world)[0], [numbers(2, 5, 4)], run)
    assert products == [2, 1] * (1 + recompute)
