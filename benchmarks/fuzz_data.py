"""Part of fuzz.py: packed tokens, Hugging Face's folders, tokenizers and configurations."""

import dataclasses
import json
import os
import random
import re
import struct
import tomllib
import types
from pathlib import Path

import h5py
import numpy as np
import torch
from fuzz import Format
from safetensors.torch import save_file

from hpctrain.config import Config, load_config, to_toml
from hpctrain.data import ShardedTokens, format, pack
from hpctrain.data.tokenizers import FileTokenizer
from hpctrain.models.export import gpt2_config
from hpctrain.models.gpt2 import GPT2Shape
from hpctrain.models.pretrained import load_gpt2
from hpctrain.shard import Shard

TEXT = "Größe: forty letters or so are enough\n"
HOSTILE = [
    0, -1, 1, 2, 7, 255, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63), 0.5, -0.0, 1e308,
    float("nan"), float("inf"), True, False, None, "", "x",
    "../../precious.txt", "/etc/passwd", ".", "..", "a\0b", "é" * 300, [], {},
    [0], [2**40, 2**40], [-1], ["../x"], {"x": 1}, [[[]]], [None],
]  # fmt: skip


# bytes


def damage_bytes(path: Path, generator: random.Random) -> str:
    content = bytearray(path.read_bytes())
    place, length = generator.randrange(len(content) + 1), generator.choice([1, 1, 4, 8, 64, 1000])
    how = generator.choice(["flip", "cut", "drop", "repeat", "zero", "fill", "random", "number"])
    if how == "flip" and content:
        content[min(place, len(content) - 1)] ^= 1 << generator.randrange(8)
    elif how == "cut":
        del content[place:]
    elif how == "drop":
        del content[place : place + length]
    elif how == "repeat":
        content[place:place] = content[place : place + length]
    elif how == "number":
        content[place : place + 8] = struct.pack("<q", generator.choice([0, -1, 1 << 31, 1 << 40, 1 << 62]))
    else:
        make = {"zero": bytes, "fill": lambda n: b"\xff" * n, "random": generator.randbytes}[how]
        content[place : place + length] = make(length)
    path.write_bytes(content)
    return f"{path.name}: {how} at {place}, {length}"


# packed tokens


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
    elif how == "contiguous":
        file.create_dataset(name, data=data)
    elif how == "compact":
        made = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        made.set_layout(h5py.h5d.COMPACT)
        kind, space = h5py.h5t.py_create(data.dtype), h5py.h5s.create_simple(data.shape)
        h5py.h5d.create(file.id, name.encode(), kind, space, made)
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
        file.create_dataset(
            name, data=data, maxshape=(None,), **stored | {"chunks": (generator.choice([1, 3, 2**12]),)}
        )
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


# JSON


def damage_json(tree, generator: random.Random) -> str:
    """One place of a tree, which is changed in place."""
    places = []

    def walk(node, path):
        if len(path) < 6:
            for key in list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
                places.append((node, key, [*path, key]))
                walk(node[key], [*path, key])

    walk(tree, [])
    node, key, path = generator.choice(places)
    how, value = generator.choice(["replace", "replace", "drop", "rename", "nudge"]), generator.choice(HOSTILE)
    if how == "nudge" and type(node[key]) is int:
        node[key] += generator.choice([-1, 1, 8, 1 << 32])
    elif how == "drop":
        del node[key]
    elif how == "rename" and isinstance(node, dict):
        node[str(value)] = node.pop(key)
    else:
        node[key] = value
    return f"{how} {path} {value!r:.60}"


def dumped(tree, generator: random.Random) -> bytes:
    text = json.dumps(tree)
    if generator.randrange(20) == 0:
        text = generator.choice(["[" * 100_000, '{"a":' * 50_000, "", "null", "[]", "9" * 5000, text[: len(text) // 2]])
    return text.encode()


# a folder of Hugging Face's


SHAPE = GPT2Shape(2, 8, 2, 4, 11)


def whole(name: str, shape: tuple[int, ...]):
    p = torch.nn.Parameter(torch.zeros(shape))
    p.shard = Shard(shape, tuple(slice(0, size) for size in shape))
    return name, p


def parameters():
    return [whole("wte.weight", (11, 8)), whole("blocks.0.attention.qkv.weight", (24, 8)), whole("ln_f.bias", (8,))]


def make_folder(folder: Path):
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    theirs = {"wte.weight": (11, 8), "h.0.attn.c_attn.weight": (8, 24), "ln_f.bias": (8,)}
    tensors = {f"transformer.{name}": torch.randn(shape, generator=generator) for name, shape in theirs.items()}
    (folder / "config.json").write_text(json.dumps(gpt2_config(SHAPE, 3)))
    save_file(tensors, folder / "model.safetensors")
    weight_map = dict.fromkeys(tensors, "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def read_folder(folder: Path):
    named = parameters()
    load_gpt2(types.SimpleNamespace(shape=SHAPE, named_parameters=lambda: named), folder)
    return {name: p.detach().numpy().tobytes() for name, p in named}


def right_folder(folder: Path, value) -> bool:
    """As the header, read without the library, tells."""
    content = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]

    def stored(name):
        told = header.get(f"transformer.{name}") or header[name]
        kind = {"F32": "<f4", "F16": "<f2", "F64": "<f8"}[told["dtype"]]
        return np.frombuffer(data[slice(*told["data_offsets"])], kind).astype("f4").reshape(told["shape"])

    columns = np.arange(24).reshape(3, 2, 4).transpose(1, 0, 2).reshape(-1)
    fused = np.ascontiguousarray(stored("h.0.attn.c_attn.weight").T[columns])
    return value == {
        "wte.weight": stored("wte.weight").tobytes(),
        "blocks.0.attention.qkv.weight": fused.tobytes(),
        "ln_f.bias": stored("ln_f.bias").tobytes(),
    }


def mutate_folder(folder: Path, generator: random.Random) -> str:
    name = generator.choice(["config.json", "model.safetensors.index.json", *["model.safetensors"] * 3])
    path = folder / name
    if generator.randrange(6) == 0:
        if generator.randrange(3):
            return damage_bytes(path, generator) if name != "model.safetensors" else cut(path, generator)
        path.unlink()
        how = generator.choice(["missing", "folder", "link"])
        if how == "folder":
            path.mkdir()
        if how == "link":
            path.symlink_to("/etc/passwd")
        return f"{name}: {how}"
    if name == "model.safetensors":
        return f"{name}: {damage_header(path, generator)}"
    tree = json.loads(path.read_bytes())
    said = damage_json(tree, generator)
    path.write_bytes(dumped(tree, generator))
    return f"{name}: {said}"


def cut(path: Path, generator: random.Random) -> str:
    size = generator.randrange(path.stat().st_size)
    os.truncate(path, size)
    return f"cut to {size}"


def damage_header(path: Path, generator: random.Random) -> str:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    how = generator.choice(["json", "json", "json", "length", "type", "data"])
    said = how
    if how == "json":
        said = damage_json(header, generator)
    if how == "type":
        said = header[generator.choice(list(header))]["dtype"] = generator.choice(
            ["F16", "F64", "I64", "BOOL", "F8_E4M3", "U32"]
        )
    text = dumped(header, generator)
    length = len(text)
    if how == "length":
        length = generator.choice([0, 1, length - 1, length + 1, length + 8, 2**27, 2**40, 2**63, 2**64 - 1])
    if how == "data":
        data = generator.choice([data[:-1], data + b"\0", b"", data * 3])
    path.write_bytes(struct.pack("<Q", length) + text + data)
    return f"{how} {said} {length}"


# tokenizers


def make_tokenizer(folder: Path):
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    folder.mkdir()
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = ["a", "b", "c"]
    made.train_from_iterator(
        ["abc abc"],
        trainers.BpeTrainer(vocab_size=12, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False),
    )
    made.save(str(folder / "tokenizer.json"))


def read_tokenizer(folder: Path):
    path = folder / "tokenizer.json"
    made = FileTokenizer(path.read_text(encoding="utf-8"), str(path))
    try:
        ids = made.encode("abc").tolist()
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return ids, made.vocabulary, made.end_of_document


def right_tokenizer(folder: Path, value) -> bool:
    """Its ids lie in its vocabulary, and the end is one that the file tells."""
    ids, vocabulary, end = value
    text = (folder / "tokenizer.json").read_text()
    return (
        all(0 <= token < vocabulary for token in ids) and 0 <= end < vocabulary and bool(re.search(rf"\b{end}\b", text))
    )


def mutate_tokenizer(folder: Path, generator: random.Random) -> str:
    path = folder / "tokenizer.json"
    tree = json.loads(path.read_text())
    said = damage_json(tree, generator)
    path.write_bytes(dumped(tree, generator))
    return said


# configurations


def make_config(folder: Path):
    folder.mkdir()
    (folder / "config.toml").write_text(to_toml(Config()))


def mutate_config(folder: Path, generator: random.Random) -> str:
    path = folder / "config.toml"
    lines = path.read_text().splitlines()
    how = generator.choice(["value", "value", "value", "line", "bytes", "deep", "key"])
    place = generator.choice([n for n, line in enumerate(lines) if " = " in line])
    key = lines[place].split(" = ")[0]
    value = generator.choice(HOSTILE)
    text = (
        "nan" if value != value else "inf" if value == float("inf") else json.dumps(value).replace("null", "2020-01-01")
    )
    if how == "bytes":
        return damage_bytes(path, generator)
    if how == "value":
        lines[place] = f"{key} = {text}"
    elif how == "line":
        lines.insert(
            place, generator.choice([lines[place], "[run]", "= 3", "[[model]]", "a.b.c = 1", "\0", "x" * 99_999])
        )
    elif how == "key":
        lines[place] = f"{json.dumps(str(value))} = 1"
    else:
        depth = generator.choice([50, 5000, 100_000])
        lines[place] = f"{key} = " + generator.choice(["[" * depth, "9" * depth, "{a=" * depth, ".".join("a" * depth)])
    path.write_text("\n".join(lines), encoding="utf-8")
    return f"{how}: {lines[place]:.100}"


def right_config(folder: Path, value) -> bool:
    """As the file tells, and otherwise the default."""
    told = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
    default, read = dataclasses.asdict(Config()), dataclasses.asdict(value)
    default["data"]["text"] = ["python-stdlib"]
    for section, table in told.items():
        for key, wanted in table.items():
            wanted = [wanted] if key == "text" and isinstance(wanted, str) else wanted
            default[section][key] = float(wanted) if isinstance(default[section][key], float) else wanted
    if not (default["data"]["text"] or default["data"]["path"]):
        default["data"]["text"] = ["python-stdlib"]
    return read == default


FORMATS = {
    "index": Format(make_data, mutate_index, read_data, right_data),
    "shard": Format(make_data, mutate_shard, read_data, right_data),
    "packed bytes": Format(make_data, mutate_bytes, read_data, right_bytes),
    "packed over": Format(
        make_data,
        mutate_packed_over,
        pack_over,
        right_bytes,
        lambda name: re.match(r"in/data(-[0-9a-f]{8}-\d+)?\.h5", name),
    ),
    "hugging face": Format(make_folder, mutate_folder, read_folder, right_folder),
    "tokenizer": Format(make_tokenizer, mutate_tokenizer, read_tokenizer, right_tokenizer),
    "toml": Format(make_config, mutate_config, lambda folder: load_config(folder / "config.toml"), right_config),
}
