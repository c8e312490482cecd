"""Part of fuzz.py: packed tokens."""

import random
import re
import struct
from pathlib import Path

import h5py
import numpy as np
from fuzz import HOSTILE, Format, damage_bytes

from hpctrain.data import ShardedTokens, format, pack

TEXT = "Größe: forty letters or so are enough\n"


def make_data(folder: Path):
    folder.mkdir()
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    pack([str(folder / "text.txt")], folder / "data.h5", shard_tokens=30)


def read_data(folder: Path):
    data = ShardedTokens(folder / "data.h5")
    try:
        return (
            data.read(0, data.tokens).tolist(),
            data.vocabulary,
            data.end_of_document,
            data.tokenizer.decode([72, 105]),
        )
    finally:
        data.close()


def right_data(folder: Path, value) -> bool:
    """What HDF5 tells of the shards, which may have been changed to other ids."""
    told = []
    for shard in sorted(folder.glob("data-*.h5")):
        with h5py.File(shard) as file:
            told += file["tokens"][:].tolist()
    return value == (told, 257, 256, "Hi") and len(told) == len(TEXT.encode()) + 1


def hostile_link(generator, file, name, data):
    """Something else in the place of a dataset."""
    how = generator.choice(
        ["soft", "external", "external storage", "virtual", "group", "none", "contiguous", "compact"]
    )
    if how == "soft":
        file.create_dataset("other", data=data, chunks=data.shape, fletcher32=True)
        file[name] = h5py.SoftLink("/other")
    elif how == "external":
        file[name] = h5py.ExternalLink(generator.choice(["/etc/passwd", "data.h5", "../precious.txt"]), "/shards")
    elif how == "external storage":
        file.create_dataset(name, data.shape, data.dtype, external=[("../../precious.txt", 0, data.nbytes)])
    elif how == "virtual":
        layout = h5py.VirtualLayout(data.shape, data.dtype)
        layout[:] = h5py.VirtualSource("data.h5", "x", data.shape)
        file.create_virtual_dataset(name, layout)
    elif how == "group":
        file.create_group(name)
    elif how == "compact" and data.nbytes < 2**15:  # more does not fit into a header
        made = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        made.set_layout(h5py.h5d.COMPACT)
        kind, space = h5py.h5t.py_create(data.dtype), h5py.h5s.create_simple(data.shape)
        h5py.h5d.create(file.id, name.encode(), kind, space, made)
    elif how in ("compact", "contiguous"):
        file.create_dataset(name, data=data)
    return how


def hostile_dataset(generator, file, name, data):
    """The dataset, or one like it that is stored in another way, or of another size or type."""
    how = generator.choice(
        ["as it is", "link", "huge", "filter", "chunk", "type", "dims", "resizable", "longer", "shorter"]
    )
    stored = {"chunks": data.shape, "fletcher32": True}
    if how == "link":
        return hostile_link(generator, file, name, data)
    if how == "huge":
        size = generator.choice([2**20, 2**31, 2**40, 2**50])
        made = file.create_dataset(
            name, (size,), data.dtype, **stored | {"maxshape": generator.choice([(size,), (None,)])}
        )
        if made.maxshape == (None,):  # of a fixed size HDF5 would note all chunks
            made[: len(data)] = data
        return f"{how} {size} {made.maxshape}"
    if how == "filter":
        more = generator.choice([{"compression": 9}, {"shuffle": True}, {"fletcher32": False}, {"scaleoffset": 0}])
        plain = data.view("u1") if "scaleoffset" in more else data
        more = {"fletcher32": False} | more if "scaleoffset" in more else more
        file.create_dataset(name, data=plain, **stored | {"chunks": plain.shape} | more)
    elif how == "chunk":
        sizes = [1, 3, 2**12] if len(data) < 2**12 else [2**12]  # HDF5 takes a kilobyte and more for each chunk
        file.create_dataset(name, data=data, maxshape=(None,), **stored | {"chunks": (generator.choice(sizes),)})
    elif how == "type":
        kind = generator.choice([">i8", "<f8", "<u1", "<u4", "S3"])
        file.create_dataset(name, (len(data),), kind, **stored)
    elif how == "dims":
        file.create_dataset(name, data=data[None], fletcher32=True, chunks=(1, *data.shape))
    elif how == "longer":
        file.create_dataset(name, data=np.concatenate([data, data]), fletcher32=True, chunks=(2 * len(data),))
    elif how == "shorter" and len(data) > 1:
        file.create_dataset(name, data=data[1:], fletcher32=True, chunks=(len(data) - 1,))
    else:
        maxshape = (None,) if how == "resizable" else None
        file.create_dataset(name, data=data, maxshape=maxshape, **stored)
    return how


def hostile_attribute(generator, values):
    name, value = generator.choice(list(values)), generator.choice(HOSTILE)
    if value is None:
        del values[name]
    else:
        values[name] = f"{value}" if isinstance(value, (dict, str)) or "\0" in str(value) else value
    return f"attribute {name} = {value!r:.60}"


def set_attributes(file, values):
    for name, value in values.items():
        try:
            file.attrs[name] = value
        except (TypeError, ValueError, OverflowError):  # not to be had in HDF5
            file.attrs[name] = str(value).replace("\0", "")


def mutate_index(folder: Path, generator: random.Random) -> str:
    with h5py.File(folder / "data.h5") as file:
        values, rows, text = dict(file.attrs), file["shards"][:], file["tokenizer"][:]
    said = []
    for _ in range(generator.choice([1, 1, 2])):
        how = generator.choice(["attribute", "row", "rows", "tokenizer", "shards", "text"])
        if how == "attribute":
            said.append(hostile_attribute(generator, values))
        elif how == "row":
            field, row = generator.choice(["name", "tokens", "bytes"]), generator.randrange(len(rows))
            old = rows[row]["name"].decode()
            names = [
                b"\xff" * 9, "../precious.txt", "/etc/passwd", "", "text.txt", "data.h5", old + "x",
                old.replace("data-", "../data-"),
                old.replace("data-", "./data-"), old.replace("data-", "other-"), old.replace("0.h5", "9.h5"),
            ]  # fmt: skip
            numbers = [0, -1, 1, 29, 31, 2**31, 2**62, 2**63 - 1, -(2**63)]
            rows[field][row] = (value := generator.choice(names if field == "name" else numbers))
            said.append(f"row {row} {field} = {value!r:.60}")
        elif how == "rows":
            rows = generator.choice([rows[::-1].copy(), np.concatenate([rows, rows]), rows[:-1].copy(), rows[[0, 0]]])
            said.append("other rows")
        elif how == "text":
            content = generator.choice([b"bytes ", b"{}", b"\xff\xfe", b"[" * 9999, b'{"model": 1}', b"x" * 99_999])
            text = np.frombuffer(content, np.uint8)
            said.append(f"tokenizer {content[:20]!r}")
        else:
            said.append(how)
    with h5py.File(folder / "data.h5", "w", libver=generator.choice([format.LIBVER, "earliest", "latest"])) as file:
        set_attributes(file, values)
        for name, data in (("tokenizer", text), ("shards", rows)):
            if name in said:
                said[said.index(name)] = f"{name}: {hostile_dataset(generator, file, name, data)}"
            elif len(data):
                file.create_dataset(name, data=data, chunks=data.shape, fletcher32=True)
    return "; ".join(said)


def mutate_shard(folder: Path, generator: random.Random) -> str:
    """With the index telling of its new size."""
    number = generator.randrange(2)
    path = sorted(folder.glob("data-*.h5"))[number]
    with h5py.File(path) as file:
        values, tokens = dict(file.attrs), file["tokens"][:]
    said, how = "", generator.choice(["attribute", "dataset", "ids", "bytes", "chunks"])
    if how == "bytes":
        said = damage_bytes(path, generator)
    else:
        if how == "attribute":
            said = hostile_attribute(generator, values)
        if how == "ids":
            place, value = generator.randrange(len(tokens)), generator.choice([0, 256, 257, 300, 65535])
            tokens[place] = value
            said = f"id {value} at {place}"
        with h5py.File(path, "w", libver=generator.choice([format.LIBVER, "earliest", "latest"])) as file:
            set_attributes(file, values)
            if how == "dataset":
                said = f"tokens: {hostile_dataset(generator, file, 'tokens', tokens)}"
            else:
                size = generator.choice([1, 2**14, 2**14, 2**18]) if how == "chunks" else format.CHUNK
                said = said or f"chunks of {size}"
                file.create_dataset("tokens", data=tokens, maxshape=(None,), chunks=(size,), fletcher32=True)
    with h5py.File(folder / "data.h5", "r+") as file:
        row = file["shards"][number]
        row["bytes"] = path.stat().st_size
        file["shards"][number] = row
    return said


def mutate_bytes(folder: Path, generator: random.Random) -> str:
    return damage_bytes(generator.choice(sorted(folder.glob("*.h5"))), generator)


def right_bytes(folder: Path, value) -> bool:
    return value == ([*TEXT.encode(), 256], 257, 256, "Hi")


def mutate_packed_over(folder: Path, generator: random.Random) -> str:
    (folder / "other-01234567-00000.h5").write_text("precious")
    return (mutate_bytes if generator.randrange(5) == 0 else mutate_index)(folder, generator)


def pack_over(folder: Path):
    pack([str(folder / "text.txt")], folder / "data.h5", shard_tokens=100)
    return read_data(folder)


def lookup3(data: bytes) -> int:
    """The checksum of HDF5's metadata: Bob Jenkins' hashlittle."""
    a = b = c = (0xDEADBEEF + len(data)) & 0xFFFFFFFF

    def step(x, y, by):  # x less y, mixed with y rotated
        return ((x - y) ^ (y << by | y >> 32 - by)) & 0xFFFFFFFF

    def end(x, y, by):
        return ((x ^ y) - (y << by | y >> 32 - by)) & 0xFFFFFFFF

    words = [struct.unpack("<3I", data[at : at + 12].ljust(12, b"\0")) for at in range(0, len(data), 12)]
    for number, (x, y, z) in enumerate(words, 1):
        a, b, c = (a + x) & 0xFFFFFFFF, (b + y) & 0xFFFFFFFF, (c + z) & 0xFFFFFFFF
        if number < len(words):
            for by in (4, 6, 8, 16, 19, 4):  # a by c, b by a, c by b, and again
                a, b, c = b, (c + b) & 0xFFFFFFFF, step(a, c, by)
    c = end(c, b, 14)
    a = end(a, c, 11)
    b = end(b, a, 25)
    c = end(c, b, 16)
    a = end(a, c, 4)
    b = end(b, a, 14)
    return end(c, b, 24)


def headers(content: bytes):
    """(start, first byte of the messages, end) of each object header; its checksum follows."""
    for found in re.finditer(b"OHDR", content):
        start, flags = found.start(), content[found.start() + 5]
        place, width = start + 6 + 16 * bool(flags & 0x20) + 4 * bool(flags & 0x10), 1 << (flags & 3)
        end = place + width + int.from_bytes(content[place : place + width], "little")
        if content[end : end + 4] == struct.pack("<I", lookup3(content[start:end])):
            yield start, place + width, end


def mutate_metadata(folder: Path, generator: random.Random) -> str:
    """Bytes of object headers, with checksums that fit, as no accident leaves them."""
    path = generator.choice(sorted(folder.glob("*.h5")))
    content, said = bytearray(path.read_bytes()), []
    known = list(headers(bytes(content)))
    for _ in range(generator.choice([1, 1, 2, 4])):
        start, first, end = generator.choice(known)
        place, width = generator.randrange(first, end), generator.choice([1, 1, 2, 4, 8])
        width = min(width, end - place)
        value = generator.choice([0, 1, 2, 127, 128, 255, content[place] ^ 1 << generator.randrange(8), -1, 1 << 30])
        content[place : place + width] = (value % (1 << 8 * width)).to_bytes(width, "little")
        content[end : end + 4] = struct.pack("<I", lookup3(content[start:end]))
        said.append(f"{value} at {place}, {width} bytes")
    path.write_bytes(content)
    return f"{path.name}: {'; '.join(said)}"


FORMATS = {
    "index": Format(make_data, mutate_index, read_data, right_data),
    "shard": Format(make_data, mutate_shard, read_data, right_data),
    "packed bytes": Format(make_data, mutate_bytes, read_data, right_bytes),
    "packed metadata": Format(make_data, mutate_metadata, read_data, right_data),
    "packed over": Format(
        make_data,
        mutate_packed_over,
        pack_over,
        right_bytes,
        lambda name: re.match(r"in/data(-[0-9a-f]{8}-\d+)?\.h5", name),
    ),
}
