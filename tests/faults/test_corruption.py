"""Damaged checkpoints: refused by name, the older one used instead, and never a wrong number."""

import json
import logging
import os
import pickle
import random
import shutil
import sys

import h5py
import numpy as np
import pytest
import torch
from checkpoint_checks import Alone, Numbers

from hpctrain.train.checkpoint import Checkpointer, checks, folder, manifest

SIZES = ((3,), (7, 5))


@pytest.fixture
def root(tmp_path):
    """Checkpoints of steps 1 and 2."""
    saver = Checkpointer(tmp_path, Alone(), background=False)
    for step in (1, 2):
        assert saver.save(step, Numbers(step, SIZES), {}) is None
    return tmp_path


def resumed(root):
    """(step, whether the numbers are that step's)."""
    numbers = Numbers(9, SIZES)
    told = Checkpointer(root, Alone()).resume(numbers)
    return told.step, numbers == Numbers(told.step, SIZES)


def test_an_untouched_checkpoint_is_loaded(root):
    assert resumed(root) == (2, True)
    assert os.readlink(root / "latest") == "step-2"
    assert folder.verify(root / "step-2").step == 2


def test_every_flipped_bit_is_found(root, caplog):
    """200 random bits, in every file: the file is named, and the older checkpoint used."""
    caplog.set_level(logging.WARNING, "hpctrain")
    generator = random.Random(0)
    files = sorted((root / "step-2").iterdir())
    assert [file.name for file in files] == ["manifest.json", "manifest.sha256", "rank-00000.h5"]
    for number in range(200):
        file = files[number % 3]
        whole = file.read_bytes()
        place, bit = generator.randrange(len(whole)), 1 << generator.randrange(8)
        file.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
        caplog.clear()
        assert resumed(root) == (1, True), (file, place, bit)
        (record,) = caplog.records
        assert record.getMessage().startswith("WARNING: checkpoint step-2 is not used: ")
        assert file.name in record.getMessage()
        assert os.readlink(root / "latest") == "step-1"
        (root / "step-2.bad").rename(root / "step-2")
        file.write_bytes(whole)
    assert resumed(root) == (2, True)


def damage(path, how):
    if how == "truncated":
        os.truncate(path, path.stat().st_size // 2)
    elif how == "empty":
        os.truncate(path, 0)
    elif how == "missing":
        path.unlink()
    elif how == "folder":
        path.unlink()
        path.mkdir()
    else:
        path.rename(path.with_name("elsewhere"))
        path.symlink_to("elsewhere")


@pytest.mark.parametrize("how", ["truncated", "empty", "missing", "folder", "link"])
@pytest.mark.parametrize("name", ["rank-00000.h5", "manifest.json", "manifest.sha256"])
def test_missing_and_short_files(root, caplog, name, how):
    if how == "link" and name != "rank-00000.h5":
        pytest.skip("a manifest is believed by its checksum, wherever it lies")
    caplog.set_level(logging.WARNING, "hpctrain")
    damage(root / "step-2" / name, how)
    with pytest.raises(manifest.Corrupt, match=name):
        folder.verify(root / "step-2")
    assert resumed(root) == (1, True)
    assert name in caplog.text


def rewrite(path, change):
    """Change a manifest, and its checksum with it."""
    values = json.loads((path / "manifest.json").read_text())
    change(values)
    content = json.dumps(values).encode()
    (path / "manifest.json").write_bytes(content)
    (path / "manifest.sha256").write_text(manifest.checksum(content))


def _first(values):
    return values["files"][0]


LIES = {
    "outside": lambda v: _first(v).update(name="../step-1/rank-00000.h5"),
    "absolute": lambda v: _first(v).update(name="/etc/passwd"),
    "negative shape": lambda v: v["tensors"].update({"0/float32.0": ["float32", [-3]]}),
    "huge shape": lambda v: v["tensors"].update({"0/float32.0": ["float32", [1 << 60]]}),
    "huge shape and piece": lambda v: (
        v["tensors"].update({"0/float32.0": ["float32", [1 << 60]]}),
        _first(v)["pieces"].update({"0/float32.0": [[[0, 1 << 60]]]}),
    ),
    "fraction": lambda v: v["tensors"].update({"0/float32.0": ["float32", [3.0]]}),
    "true": lambda v: v.update(step=True),
    "another type": lambda v: v["tensors"].update({"0/float32.0": ["object", [3]]}),
    "no pieces": lambda v: _first(v)["pieces"].update({"0/float32.0": []}),
    "a piece too few": lambda v: _first(v)["pieces"].pop("0/float32.0"),
    "a piece twice": lambda v: _first(v)["pieces"].update({"0/float32.0": [[[0, 2]], [[0, 1]]]}),
    "a piece outside": lambda v: _first(v)["pieces"].update({"0/float32.0": [[[1, 4]]]}),
    "an unknown tensor": lambda v: _first(v)["pieces"].update({"other": [[[0, 3]]]}),
    "no files": lambda v: v.update(files=[]),
    "a file twice": lambda v: v["files"].append(dict(_first(v))),
    "another format": lambda v: v.update(format="zip"),
    "a version to come": lambda v: v.update(version=3),
    "no checksum": lambda v: _first(v).update(sha256=""),
    "no CRC-32": lambda v: _first(v).update(crc32=-1),
    "chunks outside": lambda v: _first(v).update(chunks=[[0, 1 << 40]]),
    "chunks twice": lambda v: _first(v)["chunks"].append([0, 8]),
    "a number that is none": lambda v: v["scalars"].update(step=["float32", "1"]),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_that_lies(root, caplog, lie, monkeypatch):
    """With a checksum that fits: refused before anything is allocated or read by it."""
    caplog.set_level(logging.WARNING, "hpctrain")
    rewrite(root / "step-2", LIES[lie])
    monkeypatch.setattr(torch, "empty", small_only(torch.empty))
    with pytest.raises(manifest.Corrupt, match="manifest.json"):
        folder.verify(root / "step-2")
    assert resumed(root) == (1, True)
    assert "step-2" in caplog.text


def test_a_type_of_another_width(root):
    """The datasets are not what the manifest says."""
    rewrite(root / "step-2", lambda v: v["tensors"].update({"0/float32.0": ["float16", [3]]}))
    with pytest.raises(manifest.Corrupt, match=r"rank-00000.h5 does not hold 0/float32.0\[0:3\]"):
        folder.verify(root / "step-2")


def small_only(make):
    def checked(shape, *args, **kwargs):
        assert np.prod(shape, dtype=float) < 1e6
        return make(shape, *args, **kwargs)

    return checked


def test_what_hdf5_would_make_up_is_refused(root, tmp_path_factory):
    """A chunk that was never written, a virtual dataset, one outside: all with the size and checksums that fit."""
    target, dataset = root / "step-2/rank-00000.h5", "0/float32.0[0:3]"
    elsewhere = tmp_path_factory.mktemp("other") / "other.h5"
    with h5py.File(elsewhere, "w") as file:
        file["data"] = np.ones(3, "<f4")

    def unwritten(file):
        file.create_dataset(dataset, (3,), "<f4", chunks=(2,), fletcher32=True)

    def unchecked(file):
        file[dataset] = np.ones(3, "<f4")

    def virtual(file):
        layout = h5py.VirtualLayout((3,), "<f4")
        layout[:] = h5py.VirtualSource(elsewhere, "data", (3,))
        file.create_virtual_dataset(dataset, layout)

    def linked(file):
        file[dataset] = h5py.ExternalLink(str(elsewhere), "data")

    whole = target.read_bytes()
    for change in (unwritten, unchecked, virtual, linked):
        with h5py.File(target, "a") as file:
            del file[dataset]
            change(file)
        facts = seeming(target, dataset)
        rewrite(root / "step-2", lambda values, facts=facts: _first(values).update(facts))
        with pytest.raises(manifest.Corrupt, match="rank-00000.h5"):
            folder.verify(root / "step-2")
        assert resumed(root) == (1, True), change
        shutil.move(root / "step-2.bad", root / "step-2")
        target.write_bytes(whole)


def seeming(path, dataset):
    """What a manifest says of a file as it is now."""
    size = path.stat().st_size
    try:
        chunks = checks.chunks(path, [dataset])
    except (AttributeError, TypeError, KeyError, RuntimeError, ValueError):  # no chunks at all
        chunks = []
    return {"bytes": size, "sha256": checks.digest(path), "crc32": checks.crc32(path, size, chunks), "chunks": chunks}


class Malicious:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_a_pickle_is_never_opened(root, monkeypatch):
    opened = []
    watching = True

    def watch(event, arguments):
        if watching and (event == "pickle.find_class" or (event == "open" and "bad" in str(arguments[0]))):
            opened.append((event, arguments))

    monkeypatch.chdir(root)
    for name in ("bad.pkl", ".metadata.bad", "bad-optimizer.pt"):
        (root / "step-2" / name).write_bytes(pickle.dumps(Malicious()))
    sys.addaudithook(watch)
    assert resumed(root) == (2, True)
    with pytest.raises(manifest.Corrupt, match=r"bad"):  # said to be strange, by its name
        folder.verify(root / "step-2")
    watching = False
    assert opened == []
    assert not (root / "executed").exists()


def test_no_valid_checkpoint_is_an_error(root):
    for step in (1, 2):
        os.truncate(root / f"step-{step}/rank-00000.h5", 10)
    with pytest.raises(ValueError, match="none of the checkpoints in .* can be used"):
        resumed(root)


def test_another_model_is_refused_and_nothing_is_set_aside(root):
    from hpctrain.state import Described

    def refuses(saved):
        assert saved["0/float32.1"] == Described((7, 5), torch.float32)
        raise ValueError("another model")

    numbers = Numbers(1, SIZES)
    numbers.to_load = refuses
    with pytest.raises(ValueError, match="another model"):
        Checkpointer(root, Alone()).resume(numbers)
    assert folder.steps(root) == [2, 1]
