"""Starting from a Hugging Face folder: the loss is theirs, on every grid; other models are refused."""

import dataclasses
import json
import os

import pytest
import torch
from export_checks import evaluate, shared_folder, transformers_loss
from training_checks import CORNERS, UNEVEN, batches, fitting

from hpctrain import Grid, RngKey, models
from hpctrain.models.gpt2 import GPT2
from hpctrain.models.pretrained import load

pytestmark = pytest.mark.mpi
SPEC = models.get("gpt2")


def save_theirs(shape, folder, pieces="1GB", **more):
    """A model with weights of transformers' own, biases and norms included."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=shape.vocabulary, n_positions=shape.context, n_embd=shape.width, n_layer=shape.layers,
        n_head=shape.heads, tie_word_embeddings=shape.tied, **more,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) / 10)
    model.save_pretrained(folder, max_shard_size=pieces)


@pytest.mark.ranks(*CORNERS)
@pytest.mark.parametrize(("tied", "pieces"), [(True, "1GB"), (False, "10KB")])
def test_transformers_computes_the_same_loss(world, tmp_path, tied, pieces):
    folder = shared_folder(world, tmp_path)
    for number, (data, pipeline, tensor) in enumerate(CORNERS[world.size]):
        grid = Grid(data, pipeline, tensor)
        shape = dataclasses.replace(fitting(UNEVEN, pipeline), tied=tied)
        if world.rank == 0:
            save_theirs(shape, folder / str(number), pieces)
        world.Barrier()
        model = GPT2(grid, shape, key=RngKey(3), dtype=torch.float64)
        load(SPEC, model, folder / str(number))
        batch = batches(shape)[0]
        ours = evaluate(model, grid, batch)
        if world.rank == 0:
            assert ours == pytest.approx(transformers_loss(folder / str(number), batch)[0], rel=1e-12)
        world.Barrier()


@pytest.mark.ranks(1)
def test_another_model_is_refused(world, tmp_path):
    model = GPT2(Grid(), UNEVEN, key=RngKey(3))
    with pytest.raises(ValueError, match=r"holds no readable config.json"):
        load(SPEC, model, tmp_path)
    save_theirs(dataclasses.replace(UNEVEN, layers=8, vocabulary=24), tmp_path)
    with pytest.raises(ValueError, match=r"n_layer = 8, not 9; vocab_size = 24, not 23$"):
        load(SPEC, model, tmp_path)
    save_theirs(UNEVEN, tmp_path)
    told = json.loads((tmp_path / "config.json").read_text())
    for key, value, ours in (
        ("activation_function", "relu", "gelu_new"),
        ("scale_attn_weights", False, True),
        ("scale_attn_by_inverse_layer_idx", True, False),
        ("is_causal", False, True),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**told, key: value}))
        with pytest.raises(ValueError, match=f"{key} = {value}, not {ours}$"):
            load(SPEC, model, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(told))
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"model.safetensors cannot be read"):
        load(SPEC, model, tmp_path)


def strange_index(folder, file):
    """An index that says that all weights are in that file."""
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"transformer.wte.weight": file}}))


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder: strange_index(folder, "../model.safetensors"),
            "index.json tells of no plain name .*wte.weight",
        ),
        (lambda folder: strange_index(folder, "/etc/passwd"), "index.json tells of no plain name"),
        (lambda folder: strange_index(folder, ["model.safetensors"]), "index.json tells of no plain name"),
        (lambda folder: strange_index(folder, "none.safetensors"), "none.safetensors is missing"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("[]"), "index.json holds no JSON object"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), "index.json has no weight_map"),
        (lambda folder: (folder / "config.json").write_text("[" * 10**5), "holds no readable config.json: .*recursion"),
        (lambda folder: (folder / "config.json").write_text("3"), "holds no readable config.json: .*no JSON object"),
        (lambda folder: os.truncate(folder / "config.json", 2**27), "config.json is longer than the 67108864 bytes"),
        (
            lambda folder: integers(folder / "model.safetensors"),
            "wte.weight in .*model.safetensors holds I64, no floats",
        ),
    ],
)
def test_a_folder_that_lies(world, tmp_path, damage, message):
    save_theirs(UNEVEN, tmp_path)
    damage(tmp_path)
    with pytest.raises(ValueError, match=message):
        load(SPEC, GPT2(Grid(), UNEVEN, key=RngKey(3)), tmp_path)


def integers(path):
    from safetensors.torch import load_file, save_file

    save_file({name: tensor.long() for name, tensor in load_file(path).items()}, path)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("pieces", ["1GB", "10KB"])
def test_weights_without_a_place_are_refused(world, tmp_path, pieces):
    """Rather than dropped: by the configuration, and by the weights where that does not say it."""
    model = GPT2(Grid(), UNEVEN, key=RngKey(3))
    save_theirs(UNEVEN, tmp_path, pieces, add_cross_attention=True)
    with pytest.raises(ValueError, match=r"add_cross_attention = True, not False$"):
        load(SPEC, model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["add_cross_attention"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ValueError, match=r"holds 72 tensors .* place for, first transformer\.h\.0\.crossattention\.c_at"
    ):
        load(SPEC, model, tmp_path)
