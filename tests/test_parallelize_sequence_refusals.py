"""What models whose sequences several ranks share refuse: by name, on all ranks, and what would do."""

import pytest
import torch
from parallelize_checks import numbers
from test_parallelize_refusals import on_every_rank
from test_parallelize_sequence import gpt2, ids, llama, seeded
from torch import nn

import hpctrain as ht

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2)]


class LoRA(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, x):
        return self.base(x)


def with_part(make, path, part):
    def build():
        model = make()
        model.set_submodule(path, part(model.get_submodule(path)))
        return model

    return build


def patched():
    model = llama()
    model.model.layers[0].mlp.forward = lambda x: x.flip(1)
    return model


MODELS = {
    "dropout of ours": (
        with_part(gpt2, "transformer.h.1.mlp.act", lambda _: nn.Dropout(0.2)),
        r"1\.mlp\.act \(Dropout\): dropout of 0\.2 would draw masks of the tokens that a rank has; set it to 0\. Use",
    ),
    "exchanged projections": (
        with_part(llama, "model.layers.0.self_attn.q_proj", LoRA),
        r"for model\.layers\.0\.self_attn \(LlamaAttention\): its projections were exchanged.*q_proj \(LoRA\): nobody",
    ),
    "unknown activation": (
        with_part(gpt2, "transformer.h.1.mlp.act", lambda _: nn.Softmax(1)),
        r"for transformer\.h\.1\.mlp\.act \(Softmax\): nobody knows whether it mixes positions\. Use a grid with grid",
    ),
    "batch norm": (
        with_part(llama, "model.norm", lambda _: nn.BatchNorm1d(12)), r"model\.norm \(BatchNorm1d\): nobody knows"
    ),
    "a forward of its own": (patched, r"model\.layers\.0\.mlp \(LlamaMLP\): its forward was replaced"),
    "cross attention": (lambda: gpt2(add_cross_attention=True), r"h\.0 \(GPT2Block\).*: cross attention"),
    "frequencies by length": (
        lambda: llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}),
        r"rotary_emb \(LlamaRotaryEmbedding\): rope_type = dynamic depends on the tokens",
    ),
    "another model": (lambda: nn.Sequential(nn.Linear(4, 4)), "for a Sequential, whose entrance it does not know"),
}  # fmt: skip


@pytest.mark.parametrize("case", MODELS)
def test_models(world, case):
    make, text = MODELS[case]
    for data in ((1, 2, 1), (1, 1, 2)):
        on_every_rank(world, make, text, ht.Grid(data=data))


def test_replicated_attention(world):
    text = r"layers\.1\.self_attn \(LlamaAttention\): its projections were exchanged or are replicated"
    on_every_rank(world, llama, text, ht.Grid(data=(1, 2, 1)), replicate=["model.layers.1.self_attn"])


PADDED = torch.ones(3, 9, dtype=torch.long).index_fill_(1, torch.tensor([0]), 0)
CALLS = {
    "padding": (lambda m: m(ids(9), attention_mask=PADDED), "GPT2LMHeadModel got an attention_mask that is not all"),
    "cache": (lambda m: m(ids(9), use_cache=True), "got use_cache, of which a rank .* a part; leave it out"),
    "hidden states": (lambda m: m(ids(9), output_hidden_states=True), "got output_hidden_states"),
    "some logits": (lambda m: m(ids(9), logits_to_keep=1), "got logits_to_keep"),
    "encoder": (lambda m: m(ids(9), encoder_hidden_states=numbers(3, 4, 12)), "got encoder_hidden_states"),
    "nothing": (lambda m: m(), "GPT2LMHeadModel needs input_ids or inputs_embeds"),
    "generation": (lambda m: m.generate(ids(9)), "the model itself: generate keeps keys and values of whole"),
    "a part of the model": (lambda m: m.transformer(ids(9)), r"transformer\.h\.0\.attn got tokens of which nobody"),
}  # fmt: skip


@pytest.mark.parametrize("case", CALLS)
def test_calls(world, case):
    call, text = CALLS[case]
    model = ht.parallelize(seeded(gpt2), ht.Grid(data=(1, 1, 2)))
    with pytest.raises(ValueError, match=text):
        call(model)
    model(ids(9))  # and goes on


def test_losses_set_afterwards(world):
    model = ht.parallelize(seeded(gpt2), ht.Grid(data=(1, 2, 1)))
    model.loss_function = lambda logits, labels, **_: logits.sum()
    with pytest.raises(ValueError, match="has a loss_function of its own, which would see the tokens of one rank"):
        model(ids(9), labels=ids(9))


def test_ranks_with_other_batches(world):
    """Those that share sequences are given the same."""
    model = ht.parallelize(seeded(llama), ht.Grid(data=(1, 2, 1)))
    with pytest.raises(ValueError, match="rank 1 of the sequence axis calls the model with argument 0 = .* checksum"):
        model(ids(9, seed=world.rank))
