"""Packing onto a full disk, over an index that lies, and the order in which files reach the disk."""

import os
import re
import resource
import subprocess
import sys

import h5py
import numpy as np
import pytest
from children import in_child, limited

from hpctrain.cli import main
from hpctrain.data import ShardedTokens, format, pack


@pytest.fixture
def data(tmp_path):
    """An index of three shards of up to 10 tokens, in a folder of its own, and the tokens."""
    text = tmp_path / "text.txt"
    text.write_text("hello, world of tokens\n")
    (tmp_path / "data").mkdir()
    pack([str(text)], tmp_path / "data/data.h5", shard_tokens=10)
    return tmp_path / "data/data.h5"


@pytest.mark.parametrize("room", [100, 3000, 40_000, 900_000])
def test_a_full_disk(tmp_path, data, capfd, room):
    """At any size of file, in a shard or the index: told in one line, nothing is left, and the older packing stays."""
    before = sorted(data.parent.iterdir())
    text = tmp_path / "long.txt"
    text.write_text("0123456789abcde\n" * 100_000)

    def work():
        limited(room)
        assert main(["pack", str(text), "-o", str(data), "--force"]) == 2
        os._exit(7)

    assert in_child(work) == 7
    assert "hpctrain: error: [Errno 27] File too large" in capfd.readouterr().err
    assert sorted(data.parent.iterdir()) == before
    assert bytes(ShardedTokens(data).read(0, 23).tolist()) == b"hello, world of tokens\n"


def test_a_disk_that_is_full_when_the_index_is_written(tmp_path, data, monkeypatch):
    """The shards are whole by then; they are removed with it."""
    before, write = sorted(data.parent.iterdir()), os.pwrite

    def full(file, content, place):
        if "-index.h5.part" in os.readlink(f"/proc/self/fd/{file}"):
            raise OSError(28, "No space left on device")
        return write(file, content, place)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left on device"):
        pack([str(tmp_path / "text.txt")], data)
    assert sorted(data.parent.iterdir()) == before
    assert ShardedTokens(data).tokens == 24


def test_ctrl_c_while_hdf5_writes(tmp_path, data, monkeypatch):
    """It must not reach HDF5, which crashes when a write fails."""
    before = sorted(data.parent.iterdir())
    (tmp_path / "long.txt").write_text("0123456789abcde\n" * 200_000)
    write = os.pwrite

    def interrupted(file, content, place):
        if place > 1_000_000:
            raise KeyboardInterrupt
        return write(file, content, place)

    monkeypatch.setattr(os, "pwrite", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pack([str(tmp_path / "long.txt")], data)
    assert sorted(data.parent.iterdir()) == before


def test_what_fails_after_the_index_is_there(tmp_path, data, monkeypatch):
    """An error of the last sync is told; the new packing is complete all the same, and nothing of it is removed."""
    (tmp_path / "new.txt").write_text("new")
    sync, synced = os.fsync, []

    def fails_at_last(file):
        synced.append(file)
        if len(synced) == 4:  # the shard, its name, the index, its name
            raise OSError(5, "Input/output error")
        sync(file)

    monkeypatch.setattr(os, "fsync", fails_at_last)
    with pytest.raises(OSError, match="Input/output error"):
        pack([str(tmp_path / "new.txt")], data)
    assert bytes(ShardedTokens(data).read(0, 3).tolist()) == b"new"


def renamed(index, name):
    """Have an index tell of its first shard by another name."""
    with h5py.File(index, "r+") as file:
        row = file["shards"][0]
        row["name"] = str(name).encode()
        file["shards"][0] = row


NAMES = {
    "absolute": lambda folder, index: folder / "precious.txt",
    "above": lambda folder, index: "../precious.txt",
    "a file beside it": lambda folder, index: "notes.h5",
    "another packing's": lambda folder, index: "other-01234567-00000.h5",
    "below": lambda folder, index: "sub/data-01234567-00000.h5",
    "the index": lambda folder, index: "data.h5",
    "empty": lambda folder, index: "",
    "the next shard": lambda folder, index: sorted(index.parent.glob("data-*-00001.h5"))[0].name,
}


@pytest.mark.parametrize("name", NAMES)
def test_an_index_that_names_other_files(tmp_path, data, name):
    """They are neither read nor, when the index is replaced, removed."""
    (data.parent / "sub").mkdir()
    others = ["../precious.txt", "notes.h5", "other-01234567-00000.h5", "sub/data-01234567-00000.h5"]
    for other in others:
        (data.parent / other).write_text("precious")
    renamed(data, NAMES[name](tmp_path, data))
    with pytest.raises(ValueError, match=r"data.h5 is corrupt: shard 0 of packing '[0-9a-f]{8}' is called"):
        ShardedTokens(data)
    pack([str(tmp_path / "text.txt")], data)
    assert ShardedTokens(data).tokens == 24
    assert [(data.parent / other).read_text() for other in others] == ["precious"] * 4


def test_an_index_that_names_a_whole_packing_elsewhere(tmp_path, data):
    """All its shards by the names that they should have, in the folder above."""
    with h5py.File(data, "r+") as file:
        rows = file["shards"][:]
        names = [name.decode() for name in rows["name"]]
        rows["name"] = [f"../{name}" for name in names]
        file["shards"][:] = rows
    for name in names:
        (data.parent / name).rename(tmp_path / name)
    with pytest.raises(ValueError, match="data.h5 is corrupt: shard 0 of packing .* is called"):
        ShardedTokens(data)
    pack([str(tmp_path / "text.txt")], data)
    assert all((tmp_path / name).exists() for name in names)


def test_a_copied_index_does_not_remove_the_shards_of_the_first(tmp_path, data):
    """They are those of data.h5, which the copy names too."""
    (data.parent / "copy.h5").write_bytes(data.read_bytes())
    assert ShardedTokens(data.parent / "copy.h5").tokens == 24
    pack([str(tmp_path / "text.txt")], data.parent / "copy.h5")
    assert bytes(ShardedTokens(data).read(0, 5).tolist()) == b"hello"


def test_names_that_are_patterns(tmp_path, data):
    """What a failed packing has made is removed by its names, not by patterns made of them."""
    (tmp_path / "bad.txt").write_bytes(b"good" * 300_000 + b"\xff")
    with pytest.raises(ValueError, match="not UTF-8"):
        pack([str(tmp_path / "bad.txt")], data.parent / "d[a]*.h5", shard_tokens=100_000)
    assert [path.name for path in data.parent.iterdir() if path.name.startswith("d[")] == []


def rebuilt(index, change):
    """Write an index anew, with a change to its (attributes, rows, tokenizer)."""
    with h5py.File(index) as file:
        parts = dict(file.attrs), file["shards"][:], file["tokenizer"][:]
    made = change(*parts) or parts[1]
    with h5py.File(index, "w", libver=format.LIBVER) as file:
        file.attrs.update(parts[0])
        file.create_dataset("tokenizer", data=parts[2], chunks=parts[2].shape, fletcher32=True)
        if isinstance(made, np.ndarray):
            file.create_dataset("shards", data=made, chunks=made.shape, fletcher32=True)
        else:
            made(file)


def _with_rows(**values):
    def change(attributes, rows, text):
        for name, value in values.items():
            rows[name][0] = value

    return change


def _with(**values):
    return lambda attributes, rows, text: attributes.update(values)


def _stored(make):
    return lambda attributes, rows, text: lambda file: make(file, rows)


def _huge(file, rows):
    """271 TiB in 6 KiB."""
    file.create_dataset("shards", (2**40,), format.INDEX_ROW, chunks=(1024,), fletcher32=True)


def _external(file, rows):
    file.create_dataset("shards", rows.shape, rows.dtype, external=[("/etc/passwd", 0, rows.nbytes)])


def _virtual(file, rows):
    layout = h5py.VirtualLayout(rows.shape, rows.dtype)
    layout[:] = h5py.VirtualSource("/etc/passwd", "shards", rows.shape)
    file.create_virtual_dataset("shards", layout)


def _soft(file, rows):
    file.create_dataset("elsewhere", data=rows, chunks=rows.shape, fletcher32=True)
    file["shards"] = h5py.SoftLink("/elsewhere")


def _outside(file, rows):
    file["shards"] = h5py.ExternalLink("/etc/passwd", "/shards")


def _group(file, rows):
    file.create_group("shards")


def _compressed(file, rows):
    file.create_dataset("shards", data=rows, chunks=rows.shape, fletcher32=True, compression=9)


def _large_chunk(file, rows):
    file.create_dataset("shards", data=rows, maxshape=(None,), chunks=(2**20,), compression=9)


def _not_written(file, rows):
    """Twelve, of which three are there; the file has room for all."""
    made = file.create_dataset("shards", data=rows, maxshape=(None,), chunks=rows.shape, fletcher32=True)
    made.resize((12,))
    file.create_dataset("room", data=np.zeros(10_000, "u1"))


LIES = {
    "not written": (_stored(_not_written), "shards declares 12 numbers, which the file does not hold"),
    "271 TiB": (_stored(_huge), "shards declares 1099511627776 numbers, which the file does not hold"),
    "external storage": (_stored(_external), "shards is not stored in chunks"),
    "virtual": (_stored(_virtual), "shards is not stored in chunks"),
    "soft link": (_stored(_soft), "shards is a link to another place"),
    "external link": (_stored(_outside), "shards is a link to another place"),
    "group": (_stored(_group), "shards is no dataset"),
    "another filter": (_stored(_compressed), "shards is not stored in chunks"),
    "a large chunk": (_stored(_large_chunk), "shards is not stored in chunks"),
    "no shards": (_stored(lambda file, rows: None), "has no dataset shards"),
    "too many tokens": (_with_rows(tokens=2**62), "shards do not make up its tokens"),
    "a negative count": (_with_rows(tokens=-1), "shards do not make up its tokens"),
    "a short file": (_with_rows(bytes=19), "declares more tokens than its file can hold"),
    "a count that is text": (_with(tokens="24"), "attribute tokens is of type object, not int"),
    "many counts": (_with(tokens=np.arange(1000)), "attribute tokens is not one value"),
    "no vocabulary": (_with(vocabulary=0), "vocabulary 0, end_of_document 256"),
    "a huge vocabulary": (_with(vocabulary=2**60), "vocabulary 1152921504606846976"),
    "more documents than tokens": (_with(documents=25), "25 documents, 24 tokens"),
    "another vocabulary": (_with(vocabulary=300), "its tokenizer has 257 and 256; pack again"),
    "a strange packing": (_with(packing=np.bytes_("../../x")), "shard 0 of packing '../../x' is called"),
    "a version to come": (_with(version=99), "has format version 99, not 3; pack again"),
    "the version before": (_with(version=1, format="hpctrain tokens"), "has format version 1, not 3; pack again"),
    "a format of numbers": (_with(format=3), "attribute format is of type int64, not str"),
    "a text of variable length": (_with(packing="01234567"), "attribute packing is of type object, not str"),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_index_that_lies(data, lie):
    """With checksums that fit: refused by its name, and before memory is taken for it."""
    change, message = LIES[lie]
    rebuilt(data, change)

    def work():
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
        with pytest.raises(ValueError, match=f"data.h5.* {re.escape(message)}"):
            ShardedTokens(data)

    assert in_child(work) == 0


def _shard_with(tokens, **how):
    def change(path):
        with h5py.File(path) as file:
            told = dict(file.attrs)
        with h5py.File(path, "w", libver=format.LIBVER) as file:
            file.attrs.update(told)
            if isinstance(tokens, h5py.ExternalLink):
                file["tokens"] = tokens
            else:
                file.create_dataset("tokens", data=np.array(tokens, "<u2"), **how)

    return change


ONE_BIT = h5py.h5t.STD_U16LE.copy()
ONE_BIT.set_precision(1)
CHUNKED = {"chunks": (format.CHUNK,), "maxshape": (None,), "fletcher32": True}
SHARDS = {
    "an id outside the vocabulary": (_shard_with([*range(9), 257], **CHUNKED), "holds 257, and all must be below 257"),
    "a token less": (_shard_with(range(9), **CHUNKED), "holds 9 tokens, its index .* says 10; pack again"),
    "no checksum": (_shard_with(range(10), chunks=(format.CHUNK,), maxshape=(None,)), "tokens is not stored in chunks"),
    "a small chunk": (_shard_with(range(10), **{**CHUNKED, "chunks": (10,)}), "its chunks are of 10 tokens, not 16384"),
    "another type": (_shard_with(range(10), **CHUNKED, dtype="<i8"), "tokens holds int64 in 1 dims, not uint16 in one"),
    "one bit a number": (
        _shard_with(range(10), **CHUNKED, dtype=ONE_BIT),
        "tokens holds numbers of 1 bits, not uint16",
    ),
    "external link": (_shard_with(h5py.ExternalLink("/etc/passwd", "/x")), "tokens is a link to another place"),
}


@pytest.mark.parametrize("lie", SHARDS)
def test_a_shard_that_lies(data, lie):
    change, message = SHARDS[lie]
    shard = sorted(data.parent.glob("data-*.h5"))[0]
    change(shard)
    size = shard.stat().st_size
    rebuilt(data, _with_rows(bytes=size))
    tokens = ShardedTokens(data)
    assert bytes(tokens.read(10, 5).tolist()) == b"ld of"  # the others are as they were
    with pytest.raises(ValueError, match=f"data-.*-00000.h5.* {message}"):
        tokens.read(0, 10)


def test_shards_are_on_disk_before_the_index_tells_of_them(tmp_path, data):
    """What a packing in place of another does to the disk, in order, as the system saw it."""
    log = tmp_path / "strace.log"
    code = f"from hpctrain.data import pack; pack([{str(tmp_path / 'text.txt')!r}], {str(data)!r}, shard_tokens=20)"
    calls = "fsync,rename,renameat,renameat2,unlink,unlinkat"
    subprocess.run(["strace", "-f", "-y", "-e", f"trace={calls}", "-o", log, sys.executable, "-c", code], check=True)
    seen, folder = [], re.escape(str(data.parent))
    for line in log.read_text().splitlines():
        if str(data.parent) not in line or " = 0" not in line:
            continue
        call, paths = re.search(r" (\w+)\(", line)[1], re.findall(rf"{folder}(?:/([^\">]*))?", line)
        seen.append(" ".join([call.rstrip("at2"), *(re.sub("-[0-9a-f]{8}", "", path) or "folder" for path in paths)]))
    assert seen == [
        "fsync data-00000.h5.part",
        "rename data-00000.h5.part data-00000.h5",
        "fsync data-00001.h5.part",
        "rename data-00001.h5.part data-00001.h5",
        "fsync folder",
        "fsync data-index.h5.part",
        "rename data-index.h5.part data.h5",
        "fsync folder",
        "unlink data-00000.h5",
        "unlink data-00001.h5",
        "unlink data-00002.h5",
    ]
