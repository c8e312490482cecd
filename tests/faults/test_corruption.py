"""Damaged checkpoints: refused by name, the older one used instead, and never a wrong number."""

import errno
import logging
import os
import pickle
import random
import resource
import shutil
import sys

import h5py
import numpy as np
import pytest
import torch
from checkpoint_checks import SHARDS, Alone, Numbers
from two_checkpoints import SIZES, first, piece, resumed, rewrite

from hpctrain.checkpoint import Checkpointer, Corrupt, checks, folder, index, shards
from hpctrain.checkpoint.verify import verify

FILES = [
    "holders.bin", "manifest.json", "manifest.sha256", "ranks-00000/holders.bin", "ranks-00000/manifest.json",
    "ranks-00000/rank-00000.h5", "ranks-00000/rank-00000.json",
]  # fmt: skip


def test_an_untouched_checkpoint_is_loaded(root):
    assert resumed(root) == (2, True)
    assert os.readlink(root / "latest") == "step-2"
    assert verify(root / "step-2").manifest.step == 2


def test_every_flipped_bit_is_found(root, caplog):
    """210 random bits, in every file: the file is named, and the older checkpoint used."""
    caplog.set_level(logging.WARNING, "hpctrain")
    generator = random.Random(0)
    files = sorted(path for path in (root / "step-2").rglob("*") if path.is_file())
    assert [str(file.relative_to(root / "step-2")) for file in files] == FILES
    for number in range(210):
        file = files[number % 7]
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
        if how == "link":
            path.symlink_to("elsewhere")


@pytest.mark.parametrize("how", ["truncated", "empty", "missing", "folder", "link"])
@pytest.mark.parametrize("name", [*FILES, "ranks-00000"])
def test_missing_and_short_files(root, caplog, name, how):
    if how in ("truncated", "empty", "folder", "missing") and name == "ranks-00000":
        how = "renamed"
    caplog.set_level(logging.WARNING, "hpctrain")
    damage(root / "step-2" / name, how)
    with pytest.raises(Corrupt, match=f"step-2/{name}"):
        verify(root / "step-2")
    assert resumed(root) == (1, True)
    assert name in caplog.text


@pytest.mark.parametrize("by", [-12, -1, 1, 12])
def test_numbers_from_another_place(root, by):
    """A manifest that points elsewhere in the file, with all other checksums as they then are."""
    path = root / "step-2" / SHARDS

    def shift(values):
        piece(values).update(start=piece(values)["start"] + by, stop=piece(values)["stop"] + by)
        places = sorted((p["start"], p["stop"]) for pieces in first(values)["pieces"].values() for p in pieces)
        first(values)["crc32"] = checks.rest(path, path.stat().st_size, places)

    rewrite(root / "step-2", shift)
    with pytest.raises(Corrupt, match="rank-00000.h5"):
        verify(root / "step-2")
    assert resumed(root) == (1, True)


def test_hdf5_shows_the_same_numbers(root):
    """The files are plain HDF5 for everybody else; a weight is found by its name and slice."""
    ((_, (written,)),) = index.stored(verify(root / "step-2"))
    numbers = Numbers(2, SIZES)
    with h5py.File(root / "step-2" / SHARDS) as file:
        for entry in numbers.to_save():
            if entry.name == "step":  # the manifest has it
                continue
            (piece,) = written.pieces[entry.name]
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
    with pytest.raises(Corrupt, match=r"bad"):  # said to be strange, by its name
        verify(root / "step-2")
    watching = False
    assert opened == []
    assert not (root / "executed").exists()


def test_no_valid_checkpoint_is_an_error(root):
    """Each time that it is tried: a requeued job must not begin anew by itself."""
    for step in (1, 2):
        os.truncate(root / f"step-{step}" / SHARDS, 10)
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
    with pytest.raises(Corrupt, match="is of step 1"):
        verify(root / "step-9")
    assert resumed(root) == (2, True)


def test_another_model_is_refused_and_nothing_is_set_aside(root):
    from hpctrain.shard_entries import Described

    def refuses(saved):
        assert saved["0/float32.1"] == Described((7, 5), torch.float32)
        raise ValueError("another model")

    numbers = Numbers(1, SIZES)
    numbers.to_load = refuses
    with pytest.raises(ValueError, match="another model"):
        Checkpointer(root, Alone()).resume(numbers)
    assert folder.steps(root) == [2, 1]
