"""Attention of Hugging Face's kind is recognised by what it computes: heads are divided, or its layers alone."""

import pytest
import torch
from parallelize_checks import compare, numbers, tensor_grids
from torch import nn

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
