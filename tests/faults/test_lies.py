"""Manifests and tables that are whole, and lie: refused, nothing else touched."""

import contextlib
import json
import logging
import os
import tracemalloc

import numpy as np
import pytest
from checkpoint_checks import SHARDS, Numbers
from two_checkpoints import RANK, SIZES, first, piece, resumed, rewrite, sign

from hpctrain.checkpoint import Corrupt, checks, folder, index, reading
from hpctrain.checkpoint.verify import verify
from hpctrain.config import load_config
from hpctrain.train.same_training import check_same_training


def _part(values):
    return values["parts"][0]


def _as_huge(values):
    size = 1 << 60
    values["tensors"]["0/float32.0"] = ["float32", [size]]
    piece(values).update(bounds=[[0, size]], start=0, stop=4 * size)


LIES = {
    "outside": lambda v: first(v).update(name="../step-1/rank-00000.h5"),
    "absolute": lambda v: first(v).update(name="/etc/passwd"),
    "negative shape": lambda v: v["tensors"].update({"0/float32.0": ["float32", [-3]]}),
    "huge shape": lambda v: v["tensors"].update({"0/float32.0": ["float32", [1 << 60]]}),
    "huge shape and piece": _as_huge,
    "fraction": lambda v: v["tensors"].update({"0/float32.0": ["float32", [3.0]]}),
    "true": lambda v: v.update(step=True),
    "another type": lambda v: v["tensors"].update({"0/float32.0": ["object", [3]]}),
    "a type of another width": lambda v: v["tensors"].update({"0/float32.0": ["float16", [3]]}),
    "a piece outside the tensor": lambda v: piece(v).update(bounds=[[1, 4]]),
    "a piece outside the file": lambda v: piece(v).update(start=1 << 40, stop=(1 << 40) + 12),
    "a piece that ends before it starts": lambda v: piece(v).update(start=piece(v)["stop"], stop=piece(v)["start"]),
    "a piece without checksums": lambda v: piece(v).update(crc32=[]),
    "a piece with a checksum that is none": lambda v: piece(v).update(crc32=["0"]),
    "pieces in the same place": lambda v: first(v)["pieces"]["0/float32.1"][0].update(
        {key: first(v)["pieces"]["0/float32.0"][0]["start"] + n for key, n in (("start", 0), ("stop", 4 * 7 * 5))}
    ),
    "an unknown tensor": lambda v: first(v)["pieces"].update({"other": [piece(v)]}),
    "no files": lambda v: v.update(files=[]),
    "a file twice": lambda v: v["files"].append(dict(first(v))),
    "another format": lambda v: v.update(format="zip"),
    "a version to come": lambda v: v.update(version=6),
    "no checksum": lambda v: first(v).update(sha256=""),
    "no CRC-32": lambda v: first(v).update(crc32=-1),
    "another step": lambda v: v.update(step=7),
    "another rank": lambda v: (v.update(rank=1), first(v).update(name="rank-00001.h5")),
    "another size than the group's": lambda v: first(v).update(bytes=first(v)["bytes"] + 1),
    "more than there is": lambda v: v.update(files=[first(v)] * 9),
}  # fmt: skip


# Of what a rank's manifest is right about by itself, the manifest above knows better.
COUNTS = {
    "no pieces": lambda v: first(v)["pieces"].update({"0/float32.0": []}),
    "a piece too few": lambda v: first(v)["pieces"].pop("0/float32.0"),
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
        places = sorted((p["start"], p["stop"]) for pieces in first(values)["pieces"].values() for p in pieces)
        first(values)["crc32"] = checks.rest(path / SHARDS, (path / SHARDS).stat().st_size, places)

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
    rewrite(root / "step-2", lambda v: first(v).update(bytes=size))
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
