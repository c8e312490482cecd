"""Llama, Mistral, Qwen2 and Qwen3 as transformers writes and reads them: the same logits and the same bits, both ways;
what ours does not compute is refused by name."""

import contextlib
import dataclasses
import json
from unittest import mock

import pytest
import torch
from export_checks import evaluate, llama_sizes, shared_folder
from training_checks import CORNERS, batches, fitting, in_turn, made

from hpctrain import Grid, models
from hpctrain.layers import Tokens
from hpctrain.models.export import export
from hpctrain.models.llama import LlamaShape
from hpctrain.models.pretrained import load

pytestmark = pytest.mark.mpi

SPEC = models.get("llama")
LLAMA = LlamaShape(
    layers=3, width=12, heads=6, context=8, vocabulary=23, kv_heads=3, ffn=21, head_width=4, rope_base=10.0,
    rope_scaling=(8.0, 0.7, 4.0, 40), norm_eps=1e-3, tied=False,
)  # fmt: skip
PLAIN = dataclasses.replace(LLAMA, rope_scaling=(), rope_base=500000.0)
# Of each architecture a shape, and the one that an export of it has.
KINDS = {
    "Llama": (LLAMA, "Llama"),
    "Llama tied": (dataclasses.replace(PLAIN, tied=True, kv_heads=6, head_width=2), "Llama"),
    "Mistral": (PLAIN, "Llama"),
    "Mistral of heads as wide as they like": (dataclasses.replace(LLAMA, width=15), "Mistral"),
    "Qwen2": (dataclasses.replace(PLAIN, qkv_bias=True, tied=True, head_width=2), "Qwen2"),
    "Qwen3": (dataclasses.replace(PLAIN, qk_norm=True), "Qwen3"),
    "Mistral with a window": (dataclasses.replace(PLAIN, window=3), "Mistral"),
    "Qwen3 with a window": (dataclasses.replace(PLAIN, qk_norm=True, window=2), "Qwen3"),
}


def theirs(kind, shape, **more):
    """A model of transformers' own in float64, in which no two weights are alike."""
    import transformers

    kind = kind.split()[0]
    sizes = llama_sizes(shape)
    if kind != "Qwen2":
        sizes["head_dim"] = shape.head_width
    if kind == "Mistral":
        sizes["sliding_window"] = shape.window or None
    elif shape.window:
        sizes |= {"use_sliding_window": True, "sliding_window": shape.window, "max_window_layers": 0}
    torch.manual_seed(1)
    with widened():
        config = getattr(transformers, kind + "Config")(**{**sizes, **more})
        model = getattr(transformers, kind + "ForCausalLM")(config).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) / 10)
    return model


@contextlib.contextmanager
def widened():
    """What transformers computes in float32 in any model, which are norms and angles, is in float64."""
    import safetensors.torch  # noqa: F401 (modules are imported before, as they keep what they find)
    import transformers

    for kind in ("Llama", "Mistral", "Qwen2", "Qwen3", "Mixtral", "Qwen3Moe", "Glm4Moe"):
        getattr(transformers, kind + "ForCausalLM")
    with (
        mock.patch.multiple(torch, float=torch.float64, float32=torch.float64),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        yield


def their_logits(model, ids):
    with widened(), torch.no_grad():
        return model(ids).logits


def read_back(folder):
    import transformers

    with widened():
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


@pytest.mark.ranks(1)
@pytest.mark.parametrize("kind", KINDS)
def test_logits(kind, tmp_path):
    """Of theirs in our model, and of ours, with weights of its own, in theirs."""
    shape, kept = KINDS[kind]
    model, ids = theirs(kind, shape), batches(shape)[0][:, :-1]
    model.save_pretrained(tmp_path / "theirs")
    grid = Grid()
    ours, tokens = made(grid, shape).eval(), Tokens.of(grid, *ids.shape)
    load(SPEC, ours, tmp_path / "theirs")
    with torch.no_grad():
        found = ours(ids.flatten(), tokens).view(*ids.shape, -1)
        torch.testing.assert_close(found, their_logits(model, ids), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found, model(ids).logits, rtol=1e-4, atol=1e-4)  # as it is
        for p in ours.parameters():
            p.add_(torch.randn_like(p) / 10)
        export(SPEC, ours, grid, tmp_path / "ours", end_of_document=7)
        found = ours(ids.flatten(), tokens).view(*ids.shape, -1)
    again = read_back(tmp_path / "ours")
    torch.testing.assert_close(found, their_logits(again, ids), rtol=1e-12, atol=1e-12)
    assert type(again).__name__ == kept + "ForCausalLM"
    assert (again.config.eos_token_id, again.config.max_position_embeddings) == (7, shape.context)


@pytest.mark.ranks(*CORNERS)
@pytest.mark.parametrize(("kind", "pieces"), [*((kind, "1GB") for kind in KINDS), ("Qwen3", "3KB")])
def test_there_and_back(world, case, kind, pieces, tmp_path):
    """On grids that split every axis: their loss, and their bits when exported again."""
    folder = shared_folder(world, tmp_path)
    for number, (data, pipeline, tensor) in enumerate(in_turn(CORNERS, world.size, case)):
        grid = Grid(data, pipeline, tensor)
        shape = fitting(KINDS[kind][0], pipeline)
        batch, model = batches(shape)[0], None
        if world.rank == 0:
            model = theirs(kind, shape)
            model.save_pretrained(folder / f"{number}-theirs", max_shard_size=pieces)
        world.Barrier()
        ours = made(grid, shape)
        load(SPEC, ours, folder / f"{number}-theirs")
        loss = evaluate(ours, grid, batch)
        export(SPEC, ours, grid, folder / f"{number}-ours")
        if world.rank == 0:
            logits = their_logits(model, batch[:, :-1])
            expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            assert loss == pytest.approx(expected.item(), rel=1e-12)
            again = read_back(folder / f"{number}-ours").state_dict()
            assert again.keys() == model.state_dict().keys()
            assert all(torch.equal(again[name], weight) for name, weight in model.state_dict().items())
        world.Barrier()


def changed(folder, **keys):
    """config.json with other values; a key that is given ... is left out."""
    told = json.loads((folder / "config.json").read_text()) | keys
    (folder / "config.json").write_text(json.dumps({key: value for key, value in told.items() if value is not ...}))


WINDOWED = {"use_sliding_window": True, "sliding_window": 4, "layer_types": ...}
MIXED = ["full_attention", "sliding_attention", "sliding_attention"]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "rope_theta": 500000.0}


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("kind", "keys", "message"),
    [
        ("Llama", {"model_type": "gemma"}, r"model_type = gemma, not one of llama, mistral, qwen2, qwen3$"),
        ("Llama", {"model_type": ["llama"]}, r"model_type = \['llama'\], not one of llama"),
        ("Llama", {"model_type": "qwen2"}, r"model_type = qwen2, not one without model.qkv_bias"),
        ("Llama", {"model_type": "qwen3"}, r"model_type = qwen3, not one without model.qk_norm"),
        ("Qwen2", {"model_type": "llama"}, r"model_type = llama, not one with model.qkv_bias"),
        ("Llama", {"hidden_act": "gelu"}, r"hidden_act = gelu, not silu$"),
        ("Llama", {"attention_bias": True}, r"attention_bias = True, not False$"),
        ("Llama", {"mlp_bias": True}, r"mlp_bias = True, not False$"),
        ("Llama", {"is_causal": False}, r"is_causal = False, not True$"),
        ("Mistral", {"sliding_window": 4}, r"sliding_window = 4, not None$"),
        ("Mistral", {"sliding_window": ...}, r"sliding_window = 4096, not None$"),
        ("Mistral with a window", {"sliding_window": None}, r"sliding_window = None, not 3$"),
        ("Llama", {"model_type": "mistral", "sliding_window": 8}, r"sliding_window = 8, not None$"),
        ("Qwen3", WINDOWED | {"max_window_layers": 0}, r"sliding_window = 4, not None$"),
        ("Qwen3", WINDOWED | {"max_window_layers": 2}, r"sliding_window = 4 in some layers alone, not None$"),
        ("Qwen3 with a window", {"use_sliding_window": False}, r"sliding_window = None, not 2$"),
        ("Qwen3 with a window", {"max_window_layers": ..., "layer_types": ...}, r"sliding_window = None, not 2$"),
        ("Qwen3 with a window", {"layer_types": MIXED}, r"sliding_window = 2 in some layers alone, not 2$"),
        ("Mistral", {"rope_parameters": YARN}, r"rope_scaling = {'rope_type': 'yarn', .*}, not None$"),
        ("Mistral", {"rope_parameters": ..., "rope_scaling": YARN}, r"rope_scaling = {'rope_type': 'yarn', .*}, not"),
        ("Mistral", {"rope_parameters": "yarn"}, r"rope_theta = None, not 500000.0; rope_scaling = yarn, not None$"),
        ("Mistral", {"rope_parameters": {"rope_theta": 10000.0}}, r"rope_theta = 10000.0, not 500000.0$"),
        ("Mistral", {"num_key_value_heads": ...}, r"num_key_value_heads = 8, not 3$"),
        ("Llama", {"head_dim": ...}, r"head_dim = 2, not 4$"),  # width 12 / 6 heads
        ("Llama", {"rms_norm_eps": ...}, r"rms_norm_eps = 1e-06, not 0.001$"),
        ("Llama", {"vocab_size": 24}, r"vocab_size = 24, not 23$"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(kind, keys, message, tmp_path):
    shape, _ = KINDS[kind]
    theirs(kind, shape).save_pretrained(tmp_path)
    changed(tmp_path, **keys)
    with pytest.raises(ValueError, match="another model than the section .model. says: " + message):
        load(SPEC, made(Grid(), shape), tmp_path)


@pytest.mark.ranks(1)
def test_what_older_files_have(tmp_path):
    """Base and scaling as two keys, no width of heads, and frequencies among the weights."""
    from safetensors.torch import load_file, save_file

    shape = dataclasses.replace(LLAMA, head_width=2)
    theirs("Llama", shape).save_pretrained(tmp_path)
    told = json.loads((tmp_path / "config.json").read_text())
    rope = told.pop("rope_parameters")
    rope["type"] = rope.pop("rope_type")
    theta = rope.pop("rope_theta")
    changed(tmp_path, rope_parameters=..., head_dim=..., rope_theta=theta, rope_scaling=rope, pretraining_tp=1)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(1)
    save_file(weights, tmp_path / "model.safetensors")
    load(SPEC, made(Grid(), shape), tmp_path)
    weights["model.layers.0.self_attn.q_norm.bias"] = torch.ones(1)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"holds 1 tensors .* first model.layers.0.self_attn.q_norm.bias;"):
        load(SPEC, made(Grid(), shape), tmp_path)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("scaling", [YARN, {"type": "linear", "factor": 2.0}, "yarn"])
def test_scalings_that_are_not_computed(scaling):
    """As `hpctrain sample FOLDER` says it."""
    format = SPEC.huggingface
    with pytest.raises(ValueError, match="config.json scales rotary frequencies by .*; only rope_type llama3 is"):
        format.options(format.config(LLAMA, 0) | {"rope_scaling": scaling})


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("same", [True, False])
def test_a_tied_model_with_a_head(world, same, tmp_path):
    """As older files have it: the embedding once more, or else another one, which is not dropped."""
    from safetensors.torch import load_file, save_file

    shape, folder = KINDS["Llama tied"][0], shared_folder(world, tmp_path)
    if world.rank == 0:
        theirs("Llama", shape).save_pretrained(folder)
        weights = load_file(folder / "model.safetensors")
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + (0 if same else torch.eye(23, 12))
        save_file(weights, folder / "model.safetensors")
    world.Barrier()
    refused = pytest.raises(ValueError, match=r"lm_head.weight in .* is not the embedding, although config.json ties")
    with contextlib.nullcontext() if same else refused:
        load(SPEC, made(Grid(tensor=(1, world.size, 1)), shape), folder)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("kind", KINDS)
def test_options_of_a_folder(world, kind):
    """The shape of an export, as `hpctrain sample FOLDER` takes it from its config.json."""
    shape, _ = KINDS[kind]
    found = SPEC.huggingface.options(SPEC.huggingface.config(shape, 0))
    assert found.get("window", 0) == shape.window
    assert found["rope_base"] == shape.rope_base
