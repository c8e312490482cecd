"""What is exported is what was trained: Hugging Face transformers loads it and computes the same loss."""

import dataclasses
import json

import pytest
from export_checks import evaluate, shared_folder, transformers_loss
from training_checks import CORNERS, UNEVEN, batches, fitting, train_on

from hpctrain import Grid, models
from hpctrain.models import export

pytestmark = pytest.mark.mpi
SPEC = models.get("gpt2")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("file_bytes", [1 << 30, 3000])
def test_transformers_computes_the_same_loss(world, tmp_path, tied, file_bytes, monkeypatch):
    """From grids that split every axis; in one file and in many."""
    monkeypatch.setattr(export, "FILE_BYTES", file_bytes)
    folder = shared_folder(world, tmp_path)
    for number, (data, pipeline, tensor) in enumerate(CORNERS[world.size][:3]):
        grid = Grid(data, pipeline, tensor)
        shape = dataclasses.replace(fitting(UNEVEN, pipeline), tied=tied)
        model, *_ = train_on(grid, shape, count=2, clip=1.0, steps=1)
        export.export(SPEC, model, grid, folder / str(number), end_of_document=7)
        batch = batches(shape)[0]
        ours = evaluate(model, grid, batch)
        if world.rank == 0:
            theirs, config = transformers_loss(folder / str(number), batch)
            assert ours == pytest.approx(theirs, rel=1e-12)
            assert (config.eos_token_id, config.n_layer, config.tie_word_embeddings) == (7, shape.layers, tied)
            files = sorted(path.name for path in (folder / str(number)).iterdir())
            if file_bytes == 3000:
                assert len(files) > 5
                assert files[-1] == "model.safetensors.index.json"
            else:
                assert files == ["config.json", "model.safetensors"]
        world.Barrier()


def test_a_folder_that_cannot_be_written_is_an_error_on_every_rank(world, tmp_path):
    folder = shared_folder(world, tmp_path)
    grid = Grid(data=world.size)
    model, *_ = train_on(grid, UNEVEN, count=1, clip=0.0, steps=1)
    if world.rank == 0:
        (folder / "file").write_text("in the way")
    world.Barrier()
    with pytest.raises((ValueError, OSError), match="file"):
        export.export(SPEC, model, grid, folder / "file")


def test_config_json_says_that_all_is_there(world, tmp_path, monkeypatch):
    """Whoever is killed in the middle leaves none."""
    folder, grid = shared_folder(world, tmp_path), Grid(data=world.size)
    model, *_ = train_on(grid, UNEVEN, count=1, clip=0.0, steps=1)
    monkeypatch.setattr(export.HuggingFaceWriter, "close", lambda self: (self._write(), (folder / "none/file").touch()))
    with pytest.raises((ValueError, OSError), match="none/file"):
        export.export(SPEC, model, grid, folder)
    assert [path.name for path in folder.iterdir()] == ["part-0.safetensors"]


def test_an_older_export_is_replaced_whole(world, tmp_path, monkeypatch):
    folder = shared_folder(world, tmp_path)
    grid = Grid(data=world.size)
    model, *_ = train_on(grid, UNEVEN, count=1, clip=0.0, steps=1)
    monkeypatch.setattr(export, "FILE_BYTES", 3000)
    export.export(SPEC, model, grid, folder)
    if world.rank == 0:
        (folder / "model_ema.safetensors").touch()  # the user's own
    monkeypatch.setattr(export, "FILE_BYTES", 1 << 30)
    export.export(SPEC, model, grid, folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "model_ema.safetensors",
    ]
    assert json.loads((folder / "config.json").read_text())["n_embd"] == UNEVEN.width
