"""Attention of layers that are alike is run once to see what it is; one that asks for its number, in each of them."""

import pytest
from parallelize_checks import compare, numbers, tensor_grids
from torch import nn

from hpctrain.convert import alike_attention

transformers = pytest.importorskip("transformers")
from transformers.models.llama.modeling_llama import LlamaAttention  # noqa: E402

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2)]


class SquaresItsSecond(LlamaAttention):
    """In the second layer heads do not add up."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
        out, weights = super().forward(hidden_states, position_embeddings, attention_mask, **kwargs)
        return out if self.layer_idx == 0 else out.square(), weights


SquaresItsSecond.__module__ = "transformers.other"


class Layers(nn.Module):
    def __init__(self, kind, *configs):
        super().__init__()
        self.layers = nn.ModuleList(kind(config, number) for number, config in enumerate(configs))

    def forward(self, x):
        turned = numbers(2, 5, 4, seed=7)
        for layer in self.layers:
            x = x + layer(x, position_embeddings=(turned.cos(), turned.sin()), attention_mask=None)[0]
        return x


def config_of(heads=6):
    return transformers.LlamaConfig(
        hidden_size=12, num_attention_heads=heads, num_key_value_heads=2, head_dim=4, attn_implementation="sdpa"
    )


@pytest.fixture
def looked_at(monkeypatch):
    """The numbers of the layers that are run to see what they are."""
    layers, find = [], alike_attention.find_heads
    monkeypatch.setattr(
        alike_attention, "find_heads", lambda module: (layers.append(module.layer_idx), find(module))[1]
    )
    return layers


def divided(layer):
    return "SplitAttention" in [kind.__name__ for kind in type(layer).__mro__]


def test_layers_that_are_alike(world, looked_at):
    few, many = config_of(heads=2), config_of()
    for grid in tensor_grids(world):
        model = compare(lambda: Layers(LlamaAttention, many, few, many, few), grid, [numbers(2, 5, 12)])
        assert looked_at == [0, 1]
        assert all(map(divided, model.layers))


def test_what_differs_in_an_attribute(world, looked_at):
    config = config_of()

    def make():
        model = Layers(LlamaAttention, config, config, config)
        model.layers[1].scaling = 0.1
        return model

    for grid in tensor_grids(world):
        compare(make, grid, [numbers(2, 5, 12)])
        assert looked_at == [0, 1]


def test_attention_that_asks_for_its_number(world, looked_at):
    config = config_of()
    for grid in tensor_grids(world):
        model = compare(lambda: Layers(SquaresItsSecond, config, config), grid, [numbers(2, 5, 12)])
        assert looked_at == [0, 1]
        assert [divided(layer) for layer in model.layers] == [True, False]
