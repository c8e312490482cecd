"""Starting from a Hugging Face folder: the loss is theirs, on every grid; other models are refused."""

import dataclasses
import json

import pytest
import torch
from test_equivalence import CORNERS, UNEVEN, batches, fitting
from test_export import evaluate, shared_folder, transformers_loss

from hpctrain import Grid, Key
from hpctrain.models.gpt2 import GPT2
from hpctrain.models.pretrained import load_gpt2

pytestmark = pytest.mark.mpi


def save_theirs(shape, folder, pieces="1GB"):
    """A model with weights of transformers' own, biases and norms included."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=shape.vocabulary, n_positions=shape.context, n_embd=shape.width, n_layer=shape.layers,
        n_head=shape.heads, tie_word_embeddings=shape.tied,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) / 10)
    model.save_pretrained(folder, max_shard_size=pieces)


@pytest.mark.parametrize(("tied", "pieces"), [(True, "1GB"), (False, "10KB")])
def test_transformers_computes_the_same_loss(world, tmp_path, tied, pieces):
    folder = shared_folder(world, tmp_path)
    for number, (data, pipeline, tensor) in enumerate(CORNERS.get(world.size, [])):
        grid = Grid(data, pipeline, tensor)
        shape = dataclasses.replace(fitting(UNEVEN, pipeline), tied=tied)
        if world.rank == 0:
            save_theirs(shape, folder / str(number), pieces)
        world.Barrier()
        model = GPT2(grid, shape, key=Key(3), dtype=torch.float64)
        load_gpt2(model, folder / str(number))
        batch = batches(shape)[0]
        ours = evaluate(model, grid, batch)
        if world.rank == 0:
            assert ours == pytest.approx(transformers_loss(folder / str(number), batch)[0], rel=1e-12)
        world.Barrier()


def test_another_model_is_refused(world, tmp_path):
    if world.size > 1:
        pytest.skip("every rank does the same")
    model = GPT2(Grid(), UNEVEN, key=Key(3))
    with pytest.raises(ValueError, match=r"holds no readable config.json"):
        load_gpt2(model, tmp_path)
    save_theirs(dataclasses.replace(UNEVEN, layers=8, vocabulary=24), tmp_path)
    with pytest.raises(ValueError, match=r"n_layer = 8, not 9; vocab_size = 24, not 23$"):
        load_gpt2(model, tmp_path)
    save_theirs(UNEVEN, tmp_path)
    told = json.loads((tmp_path / "config.json").read_text())
    for key, value, ours in (
        ("activation_function", "relu", "gelu_new"),
        ("scale_attn_weights", False, True),
        ("scale_attn_by_inverse_layer_idx", True, False),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**told, key: value}))
        with pytest.raises(ValueError, match=f"{key} = {value}, not {ours}$"):
            load_gpt2(model, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(told))
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"model.safetensors cannot be read"):
        load_gpt2(model, tmp_path)
