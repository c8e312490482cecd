"""Part of fuzz.py: Hugging Face's folders, tokenizers and configurations."""

import dataclasses
import json
import os
import random
import re
import struct
import tomllib
import types
from pathlib import Path

import numpy as np
import torch
from fuzz import HOSTILE, Format, damage_bytes, damage_json, dumped
from safetensors.torch import save_file

from hpctrain import models
from hpctrain.config import Config, load_config, to_toml
from hpctrain.data.tokenizers import FileTokenizer
from hpctrain.models.gpt2 import GPT2Shape
from hpctrain.models.pretrained import load
from hpctrain.shard import Shard

# a folder of Hugging Face's


SPEC = models.get("gpt2")
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
    (folder / "config.json").write_text(json.dumps(SPEC.huggingface.config(SHAPE, 3)))
    save_file(tensors, folder / "model.safetensors")
    weight_map = dict.fromkeys(tensors, "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def read_folder(folder: Path):
    named = parameters()
    load(SPEC, types.SimpleNamespace(shape=SHAPE, named_parameters=lambda: named), folder)
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
    "hugging face": Format(make_folder, mutate_folder, read_folder, right_folder),
    "tokenizer": Format(make_tokenizer, mutate_tokenizer, read_tokenizer, right_tokenizer),
    "toml": Format(make_config, mutate_config, lambda folder: load_config(folder / "config.toml"), right_config),
}
