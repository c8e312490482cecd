"""Attention of Hugging Face's families as blocks: heads divided, and every dropout drawn as on one rank."""

import copy
from pathlib import Path

import pytest
import torch
from parallelize_checks import check_gradients

import hpctrain as ht

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3, 4)]

DROPOUT = dict.fromkeys(
    "attn_pdrop resid_pdrop attention_dropout hidden_dropout dropout_rate dropout attention_probs_dropout_prob "
    "hidden_dropout_prob drop_path_rate".split(), 0.2
)  # fmt: skip
FAMILIES = {  # what: (model of the zoo, other options, name of the attention's type)
    "t5": ("t5", {}, "T5Attention"),
    "t5 eager": ("t5", {"attn_implementation": "eager"}, "T5Attention"),
    "umt5": ("umt5", {}, "UMT5Attention"),
    "gpt-j": ("gptj", {}, "GPTJAttention"),
    "falcon": ("falcon", {"multi_query": False}, "FalconAttention"),
    "falcon of one key head": ("falcon", {"multi_query": True, "attn_implementation": "eager"}, "FalconAttention"),
    "falcon of groups": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}, "FalconAttention"),
    "falcon with alibi": ("falcon", {"alibi": True}, "FalconAttention"),
    "falcon with alibi, eager": ("falcon", {"alibi": True, "attn_implementation": "eager"}, "FalconAttention"),
    "bloom": ("bloom", {}, "BloomAttention"),
    "mpt": ("mpt", {}, "MptAttention"),
    "phi3": ("phi3", {}, "Phi3Attention"),
    "phi3 of one key head": ("phi3", {"num_key_value_heads": 1, "attn_implementation": "eager"}, "Phi3Attention"),
    "deepseek v2": ("deepseek_v2", {}, "DeepseekV2Attention"),
    "deepseek v3": ("deepseek_v3", {"attention_bias": True}, "DeepseekV3Attention"),
    "deepseek v3 of whole queries": ("deepseek_v3", {"q_lora_rank": None}, "DeepseekV3Attention"),
    "swin": ("swin", {}, "SwinAttention"),
    "gemma2": ("gemma2", {"attn_implementation": "eager", "attn_logit_softcapping": 2.0}, "Gemma2Attention"),
    "distilbert": ("distilbert", {}, "DistilBertSelfAttention"),
    "roformer": ("roformer", {}, "RoFormerSelfAttention"),
    "megatron-bert": ("megatron-bert", {}, "MegatronBertSelfAttention"),
    "esm": ("esm", {}, "EsmSelfAttention"),
    "mpnet": ("mpnet", {}, "MPNetSelfAttention"),
    "rembert": ("rembert", {}, "RemBertSelfAttention"),
    "modernbert": ("modernbert", {}, "ModernBertAttention"),
    "dinov3": (
        "dinov3_vit", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}, "DINOv3ViTAttention",
    ),
}  # fmt: skip
OF_FOUR = {"t5", "falcon with alibi", "deepseek v3", "swin"}  # of biases, slopes, latent keys and windows
NONE_WITHOUT_HEADS = {"deepseek v2", "swin"}  # theirs is left to its layers where a rank would have no head


@pytest.fixture
def zoo(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import zoo
    import zoo_models

    def make(name):
        model, options, _ = FAMILIES[name]
        known = transformers.AutoConfig.for_model(model)
        more = {key: value for key, value in {**DROPOUT, **options}.items() if key in options or hasattr(known, key)}
        monkeypatch.setitem(zoo_models.OPTIONS, model, {**zoo_models.OPTIONS.get(model, {}), **more})
        torch.manual_seed(0)
        made, inputs = zoo_models.models()[f"transformers/{model}"]()
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        for module in made.modules():
            if hasattr(module, "attn_dropout_p"):  # MPT's configuration takes whole numbers alone
                module.attn_dropout_p = 0.2
        return made.double(), {key: x.double() if x.is_floating_point() else x for key, x in inputs.items()}

    zoo.make = make
    return zoo


@pytest.mark.parametrize(
    "name", [name if name in OF_FOUR else pytest.param(name, marks=pytest.mark.ranks(2, 3)) for name in FAMILIES]
)
def test_dropout(world, zoo, name):
    serial, inputs = zoo.make(name)
    serial.train()
    model = ht.parallelize(copy.deepcopy(serial), ht.Grid(tensor=world.size))
    kinds = {type(module).__name__ for module in model.modules()}
    assert f"Split{FAMILIES[name][2]}" in kinds
    assert (FAMILIES[name][2] in kinds) <= (name in NONE_WITHOUT_HEADS)
    expected, got = (zoo.run(m, inputs) for m in (serial, model))
    assert expected.keys() == got.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(got[key], tensor, rtol=1e-11, atol=1e-11)
    states = world.allgather(torch.get_rng_state())
    assert all(torch.equal(states[0], other) for other in states)
    check_gradients(model, serial, model.hpctrain_grid)


@pytest.mark.ranks(2)
def test_a_tuple_of_one(world, zoo):
    """MPNet's attention gives its weights where they are asked for, and else a tuple of its output."""
    model, inputs = zoo.make("mpnet")
    model = ht.parallelize(model.eval(), ht.Grid(tensor=2))
    (attention, *_) = (each for each in model.modules() if type(each).__name__ == "SplitMPNetSelfAttention")
    x = torch.randn(2, 5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    (out,) = attention(x)
    again, weights = attention(x, output_attentions=True)
    assert torch.equal(out, again)
    assert weights.shape == (2, attention.all_heads, 5, 5)
