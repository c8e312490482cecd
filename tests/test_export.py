"""What is exported is what was trained: Hugging Face transformers loads it and computes the same loss."""

import dataclasses
import json
import resource
from pathlib import Path

import pytest
from export_checks import evaluate, shared_folder, transformers_loss
from training_checks import CORNERS, UNEVEN, batches, fitting, train_on

from hpctrain import Grid, files, models
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


@pytest.fixture
def trained(world, tmp_path):
    """(model, grid, folder, content of the folder) with an export of several files in the folder."""
    folder, grid = shared_folder(world, tmp_path), Grid(data=world.size)
    model, *_ = train_on(grid, UNEVEN, count=1, clip=0.0, steps=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "FILE_BYTES", 3000)
        export.export(SPEC, model, grid, folder)
    there = content(folder)
    world.Barrier()
    return model, grid, folder, there


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_full_disk_leaves_the_older_export(world, trained, monkeypatch):
    """Every rank hears it in one line; nothing is left beside."""
    model, grid, folder, older = trained
    write = export.HuggingFaceWriter._write

    def full(writer):
        usual = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, usual[1]))
        try:
            write(writer)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, usual)

    monkeypatch.setattr(export.HuggingFaceWriter, "_write", full)
    with pytest.raises((ValueError, OSError), match=r"the weights cannot be written to \S+: .*File too large.*"):
        export.export(SPEC, model, grid, folder)
    world.Barrier()
    assert content(folder) == older


def test_files_take_their_places_once_all_are_on_disk(world, trained, monkeypatch):
    """Until then the older export is there; config.json is the last to come."""
    model, grid, folder, older = trained
    synced, sync = [], files.sync

    def noted(path):
        synced.append((path.name, {path.name for path in folder.iterdir()}))
        sync(path)

    monkeypatch.setattr(files, "sync", noted)
    export.export(SPEC, model, grid, folder)
    ours = {"config.json", "model.safetensors"}
    if world.rank == 0:
        assert synced[:-1] == [(name, {*older, files.DRAFT}) for name in ("model.safetensors", "config.json")]
        assert synced[-1] == (folder.name, ours | {files.DRAFT})
    world.Barrier()
    assert {path.name for path in folder.iterdir()} == ours


def test_what_a_killed_export_left_is_no_export(world, trained, monkeypatch):
    """Killed as its files took their places, and before: config.json says that all is there, and the next one has
    nothing of it."""
    model, grid, folder, _ = trained
    rename, config = Path.rename, folder / "config.json"
    if world.rank == 0:
        (folder / files.DRAFT).mkdir()
        (folder / files.DRAFT / "model-00009-of-00009.safetensors").touch()
    with monkeypatch.context() as patch:
        patch.setattr(export, "FILE_BYTES", 3000)
        patch.setattr(Path, "rename", lambda path, to: rename(folder / "none" if to == config else path, to))
        with pytest.raises((ValueError, OSError), match="none"):
            export.export(SPEC, model, grid, folder)
    world.Barrier()
    left = {path.name for path in folder.iterdir()}
    assert "config.json" not in left
    assert "model-00009-of-00009.safetensors" not in left
    world.Barrier()
    export.export(SPEC, model, grid, folder)
    world.Barrier()
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}


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
