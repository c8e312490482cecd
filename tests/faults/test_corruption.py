"""Damaged checkpoints: refused by name, the older one used instead, and never a wrong number."""

import contextlib
import errno
import json
import logging
import os
import pickle
import random
import resource
import shutil
import sys
import tracemalloc

import h5py
import numpy as np
import pytest
import torch
from checkpoint_checks import Alone, Numbers

from hpctrain.train.checkpoint import Checkpointer, checks, folder, manifest, shards

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


def _piece(values):
    return _first(values)["pieces"]["0/float32.0"][0]


def _as_huge(values):
    size = 1 << 60
    values["tensors"]["0/float32.0"] = ["float32", [size]]
    _piece(values).update(bounds=[[0, size]], start=0, stop=4 * size)


LIES = {
    "outside": lambda v: _first(v).update(name="../step-1/rank-00000.h5"),
    "absolute": lambda v: _first(v).update(name="/etc/passwd"),
    "negative shape": lambda v: v["tensors"].update({"0/float32.0": ["float32", [-3]]}),
    "huge shape": lambda v: v["tensors"].update({"0/float32.0": ["float32", [1 << 60]]}),
    "huge shape and piece": _as_huge,
    "fraction": lambda v: v["tensors"].update({"0/float32.0": ["float32", [3.0]]}),
    "true": lambda v: v.update(step=True),
    "another type": lambda v: v["tensors"].update({"0/float32.0": ["object", [3]]}),
    "a type of another width": lambda v: v["tensors"].update({"0/float32.0": ["float16", [3]]}),
    "no pieces": lambda v: _first(v)["pieces"].update({"0/float32.0": []}),
    "a piece too few": lambda v: _first(v)["pieces"].pop("0/float32.0"),
    "a piece twice": lambda v: _first(v)["pieces"]["0/float32.0"].append(_piece(v)),
    "a piece outside the tensor": lambda v: _piece(v).update(bounds=[[1, 4]]),
    "a piece outside the file": lambda v: _piece(v).update(start=1 << 40, stop=(1 << 40) + 12),
    "a piece that ends before it starts": lambda v: _piece(v).update(start=_piece(v)["stop"], stop=_piece(v)["start"]),
    "a piece without checksums": lambda v: _piece(v).update(crc32=[]),
    "a piece with a checksum that is none": lambda v: _piece(v).update(crc32=["0"]),
    "pieces in the same place": lambda v: _first(v)["pieces"]["0/float32.1"][0].update(
        {key: _first(v)["pieces"]["0/float32.0"][0]["start"] + n for key, n in (("start", 0), ("stop", 4 * 7 * 5))}
    ),
    "an unknown tensor": lambda v: _first(v)["pieces"].update({"other": [_piece(v)]}),
    "no files": lambda v: v.update(files=[]),
    "a file twice": lambda v: v["files"].append(dict(_first(v))),
    "another format": lambda v: v.update(format="zip"),
    "a version to come": lambda v: v.update(version=4),
    "no checksum": lambda v: _first(v).update(sha256=""),
    "no CRC-32": lambda v: _first(v).update(crc32=-1),
    "a number that is none": lambda v: v["scalars"].update(step=["float32", "1"]),
    "a number too large": lambda v: v["scalars"].update(step=["float32", 10**30]),
    "a fraction for a whole number": lambda v: v["scalars"].update(step=["int64", 1.5]),
    "another step": lambda v: v.update(step=7),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_that_lies(root, caplog, lie):
    """With a checksum that fits: refused before anything is allocated or read by it."""
    caplog.set_level(logging.WARNING, "hpctrain")
    rewrite(root / "step-2", LIES[lie])
    with little_memory():
        with pytest.raises(manifest.Corrupt, match="manifest.json"):
            folder.verify(root / "step-2")
        assert resumed(root) == (1, True)
    assert "step-2" in caplog.text


def test_a_long_file_takes_no_memory(root):
    """256 MiB of nothing after the numbers, and a manifest that knows of them."""
    path = root / "step-2/rank-00000.h5"
    os.truncate(path, 256 << 20)
    rewrite(root / "step-2", lambda v: _first(v).update(bytes=256 << 20))
    with little_memory():
        assert resumed(root) == (1, True)


@contextlib.contextmanager
def little_memory():
    """What is allocated here stays below 8 MB at any moment."""
    tracemalloc.start()
    yield
    assert tracemalloc.get_traced_memory()[1] < 8e6
    tracemalloc.stop()


@pytest.mark.parametrize("by", [-12, -1, 1, 12])
def test_numbers_from_another_place(root, by):
    """A manifest that points elsewhere in the file, with all other checksums as they then are."""
    path = root / "step-2/rank-00000.h5"

    def shift(values):
        _piece(values).update(start=_piece(values)["start"] + by, stop=_piece(values)["stop"] + by)
        places = sorted((p["start"], p["stop"]) for pieces in _first(values)["pieces"].values() for p in pieces)
        _first(values)["crc32"] = checks.rest(path, path.stat().st_size, places)

    rewrite(root / "step-2", shift)
    with pytest.raises(manifest.Corrupt, match="rank-00000.h5"):
        folder.verify(root / "step-2")
    assert resumed(root) == (1, True)


def test_hdf5_shows_the_same_numbers(root):
    """The files are plain HDF5 for everybody else; a weight is found by its name and slice."""
    told = folder.verify(root / "step-2")
    numbers = Numbers(2, SIZES)
    with h5py.File(root / "step-2/rank-00000.h5") as file:
        for entry in numbers.to_save():
            if entry.name == "step":  # the manifest has it
                continue
            (piece,) = told.files[0].pieces[entry.name]
            dataset = file[shards.dataset_name(entry.name, piece.bounds)]
            assert (dataset.shape, dataset.id.get_offset()) == (piece.shape, piece.start)
            assert np.array_equal(dataset[()], shards.bits(entry.tensor))


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
    """Each time that it is tried: a requeued job must not begin anew by itself."""
    for step in (1, 2):
        os.truncate(root / f"step-{step}/rank-00000.h5", 10)
    for _ in range(2):
        with pytest.raises(ValueError, match="none of the checkpoints in .* can be used"):
            resumed(root)


@pytest.mark.parametrize("more", range(4))
def test_what_cannot_be_read_is_not_called_corrupt(root, more):
    """A process with few files left to open says so, or does with them, and leaves the checkpoints alone."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + more, before[1]))
    try:
        assert resumed(root) == (2, True)
    except OSError as error:
        assert error.errno == errno.EMFILE  # noqa: PT017
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert resumed(root) == (2, True)


def test_names_that_no_checkpoint_has(root):
    """A folder that looks like one, and a checkpoint under another step's name."""
    (root / "step-007").mkdir()
    shutil.copytree(root / "step-1", root / "step-9")
    with pytest.raises(manifest.Corrupt, match="is of step 1"):
        folder.verify(root / "step-9")
    assert resumed(root) == (2, True)


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
