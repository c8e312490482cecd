"""Damaged checkpoints: refused by name, the older one used instead, and never a wrong number."""

import contextlib
import errno
import hashlib
import json
import logging
import os
import pickle
import random
import resource
import shutil
import sys
import tracemalloc
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from checkpoint_checks import Alone, Numbers

from hpctrain.checkpoint import Checkpointer, Corrupt, checks, folder, index, reading, shards
from hpctrain.checkpoint.verify import verify
from hpctrain.config import load_config
from hpctrain.train.same_training import check_same_training

SIZES = ((3,), (7, 5))
SHARDS = "ranks-00000/rank-00000.h5"
FILES = [
    "holders.bin", "manifest.json", "manifest.sha256", "ranks-00000/holders.bin", "ranks-00000/manifest.json",
    "ranks-00000/rank-00000.h5", "ranks-00000/rank-00000.json",
]  # fmt: skip


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


RANK = "ranks-00000/rank-00000.json"


def rewrite(path, change, name=RANK):
    """Change a manifest, and the checksums in those above it."""
    values = json.loads((path / name).read_text())
    change(values)
    sign(path, name, json.dumps(values).encode())


def sign(path, name, content):
    """Write a file that a manifest describes, and change that one's checksum of it, up to the uppermost."""
    (path / name).write_bytes(content)
    digest, folder = hashlib.sha256(content).hexdigest(), Path(name).parent
    if name == "manifest.json":
        (path / "manifest.sha256").write_text(f"{digest}  manifest.json\n")
        return
    above = "manifest.json" if folder == Path() or name.endswith("manifest.json") else f"{folder}/manifest.json"

    def describe(values):
        if name.endswith("holders.bin"):
            values["holders"] = digest
        else:
            values["parts"][0].update(bytes=len(content), sha256=digest)

    rewrite(path, describe, above)


def _first(values):
    return values["files"][0]


def _piece(values):
    return _first(values)["pieces"]["0/float32.0"][0]


def _part(values):
    return values["parts"][0]


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
    "a version to come": lambda v: v.update(version=6),
    "no checksum": lambda v: _first(v).update(sha256=""),
    "no CRC-32": lambda v: _first(v).update(crc32=-1),
    "another step": lambda v: v.update(step=7),
    "another rank": lambda v: (v.update(rank=1), _first(v).update(name="rank-00001.h5")),
    "another size than the group's": lambda v: _first(v).update(bytes=_first(v)["bytes"] + 1),
    "more than there is": lambda v: v.update(files=[_first(v)] * 9),
}  # fmt: skip

# Of what a rank's manifest is right about by itself, the manifest above knows better.
COUNTS = {
    "no pieces": lambda v: _first(v)["pieces"].update({"0/float32.0": []}),
    "a piece too few": lambda v: _first(v)["pieces"].pop("0/float32.0"),
}

LIES_ABOVE = {
    "a number that is none": lambda v: v["scalars"].update(step=["float32", "1"]),
    "a number too large": lambda v: v["scalars"].update(step=["float32", 10**30]),
    "a fraction for a whole number": lambda v: v["scalars"].update(step=["int64", 1.5]),
    "another step": lambda v: v.update(step=7),
    "another tensor": lambda v: v["tensors"].update({"other": ["float32", [3]]}),
    "another shape": lambda v: v["tensors"].update({"0/float32.1": ["float32", [70, 5]]}),
    "a tensor too few": lambda v: v["tensors"].pop("0/float32.1"),
    "a part outside": lambda v: _part(v).update(name="../step-1/ranks-00000/manifest.json"),
    "a part elsewhere": lambda v: _part(v).update(name="/etc/passwd"),
    "no parts": lambda v: v.update(parts=[]),
    "a part twice": lambda v: v["parts"].append(_part(v)),
    "a part without checksum": lambda v: _part(v).update(sha256=None),
    "a part of another size": lambda v: _part(v).update(bytes=10),
    "no table": lambda v: v.update(holders="0" * 64),
    "more files than there are": lambda v: _part(v).update(files=1 << 50),
    "more bytes than there are": lambda v: _part(v).update(stored=1),
    "parts that are none": lambda v: v.update(parts=[[]]),
    "more members": lambda v: v.update(more=1),
    "too deep": lambda v: v.update(about=json.loads("[" * 900 + "]" * 900)),
}


@pytest.mark.parametrize(("name", "lie"), [
    *((RANK, lie) for lie in LIES), *((RANK, lie) for lie in COUNTS),
    *((name, lie) for name in ("manifest.json", "ranks-00000/manifest.json") for lie in LIES_ABOVE)
])  # fmt: skip
def test_a_manifest_that_lies(root, caplog, name, lie):
    """With checksums that fit: refused before anything is allocated or read by it."""
    caplog.set_level(logging.WARNING, "hpctrain")
    rewrite(root / "step-2", (LIES | COUNTS | LIES_ABOVE)[lie], name)
    with little_memory():
        with pytest.raises(Corrupt, match=r"manifest.json|holders.bin|rank-00000") as found:
            verify(root / "step-2")
        assert str(root / "step-2") in str(found.value)
        assert resumed(root) == (1, True)
    assert "step-2" in caplog.text


@pytest.mark.parametrize("lie", COUNTS)
def test_memory_that_no_file_fills(root, lie):
    """A manifest that lacks a piece, with all checksums as they then are: nothing is left as it was allocated."""
    path = root / "step-2"

    def without(values):
        COUNTS[lie](values)
        places = sorted((p["start"], p["stop"]) for pieces in _first(values)["pieces"].values() for p in pieces)
        _first(values)["crc32"] = checks.rest(path / SHARDS, (path / SHARDS).stat().st_size, places)

    rewrite(path, without)
    with pytest.raises(Corrupt, match="step-2/manifest.json: the files hold 0 of 3 elements of 0/float32.0"):
        reading.load(index.read(path), Numbers(9, SIZES).to_save())
    assert resumed(root) == (1, True)


def test_a_part_outside_of_the_checkpoint(root):
    """Right in all but its place."""
    path = root / "step-2"
    (path / "ranks-00000").rename(root / "ranks-00000")
    rewrite(path, lambda values: _part(values).update(name="../ranks-00000/manifest.json"), "manifest.json")
    with pytest.raises(Corrupt, match="step-2/manifest.json: '../ranks-00000/manifest.json' is not the name of a part"):
        index.read(path)
    assert resumed(root) == (1, True)


TABLES = {
    "shorter": lambda rows: rows[:-1],
    "longer": lambda rows: np.concatenate([rows, rows[-1:]]),
    "no rows": lambda rows: rows[:0],
    "bytes left over": lambda rows: np.frombuffer(rows.tobytes()[:-3] + b"abcdefgh", np.uint8),
    "negative": lambda rows: rows * [-1, *[1] * (rows.shape[1] - 1)] - np.eye(1, rows.shape[1], dtype=np.int64),
    "no such tensor": lambda rows: rows + np.eye(1, rows.shape[1], dtype=np.int64) * 100,
    "no such part": lambda rows: rows + np.eye(1, rows.shape[1], 1, dtype=np.int64),
    "another number of elements": lambda rows: rows + np.eye(1, rows.shape[1], 2, dtype=np.int64),
    "sums that overflow": lambda rows: np.concatenate(
        [rows[:1] + np.eye(1, rows.shape[1], 2, dtype=np.int64) * (2**63 - 4), rows[1:]]
    ),
    "outside": lambda rows: rows + np.eye(1, rows.shape[1], rows.shape[1] - 1, dtype=np.int64) * 2**40,
    "another order": lambda rows: rows[::-1],
}


def test_a_checkpoint_of_the_version_before(root):
    """Refused by what it is, not taken for a damaged one: it stays where it is, and no older one takes its place."""
    rewrite(root / "step-2", lambda v: v.update(version=4), "manifest.json")
    said = "step-2/manifest.json: format version 4 is not 5, .*; go on with the hpctrain that saved it, or start anew"
    with pytest.raises(ValueError, match=said):
        resumed(root)
    assert folder.steps(root) == [2, 1]
    assert folder.bad(root) == []


def test_a_checkpoint_that_says_nothing_of_a_training(root):
    """As one that a script saved: whoever asks it for what `hpctrain train` writes gets an error that names it."""
    manifest = index.read(root / "step-2").manifest
    manifest.about = {"data": {"batches": 7}}
    assert manifest.member("data", "batches") == 7
    with pytest.raises(
        ValueError, match=r"step 2 does not say its sanity\.losses, as those that `hpctrain train` saves"
    ):
        manifest.member("sanity", "losses")
    with pytest.raises(ValueError, match=r"step 2 does not say its config\.model"):
        check_same_training(manifest, load_config(), {})


@pytest.mark.parametrize("lie", TABLES)
@pytest.mark.parametrize("folder_", ["", "ranks-00000/"])
def test_a_table_that_lies(root, folder_, lie):
    path = root / "step-2"
    rows = np.frombuffer((path / f"{folder_}holders.bin").read_bytes(), "<i8").reshape(-1, 7)
    sign(path, f"{folder_}holders.bin", TABLES[lie](rows).astype(rows.dtype if lie[0] != "b" else np.uint8).tobytes())
    with little_memory():
        with pytest.raises(Corrupt, match=f"step-2/.*({NAMES})"):
            verify(path)
        assert resumed(root) in ((1, True), (2, True))


NAMES = "manifest.json|holders.bin"


def test_a_long_file_takes_no_memory(root):
    """256 MiB of nothing after the numbers, and a manifest that knows of them."""
    path, size = root / "step-2" / SHARDS, 256 << 20
    os.truncate(path, size)
    rewrite(root / "step-2", lambda v: _first(v).update(bytes=size))
    for above in ("ranks-00000/manifest.json", "manifest.json"):
        rewrite(root / "step-2", lambda v: _part(v).update(stored=size), above)
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
    path = root / "step-2" / SHARDS

    def shift(values):
        _piece(values).update(start=_piece(values)["start"] + by, stop=_piece(values)["stop"] + by)
        places = sorted((p["start"], p["stop"]) for pieces in _first(values)["pieces"].values() for p in pieces)
        _first(values)["crc32"] = checks.rest(path, path.stat().st_size, places)

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
