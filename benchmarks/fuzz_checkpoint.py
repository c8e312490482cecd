"""Part of fuzz.py: checkpoints. What manifests say is signed again in those above, as by somebody who means it."""

import hashlib
import json
import random
import shutil
from pathlib import Path

import h5py
import numpy as np
import torch
from fuzz import Format, damage_bytes, damage_json, dumped

from hpctrain.checkpoint import Checkpointer, checks, index, reading
from hpctrain.checkpoint.pieces import parse
from hpctrain.checkpoint.verify import verify
from hpctrain.shard import Shard
from hpctrain.shard_entries import Entry

STEP = "step-2"
GROUP = f"{STEP}/ranks-00000"
RANK, SHARDS = f"{GROUP}/rank-00000.json", f"{GROUP}/rank-00000.h5"
SIZES = {"model/a.weight": (7, 5), "model/b.weight": (3,), "optimizer/exp_avg/a.weight": (130, 70)}


class Alone:
    """A communicator of one rank."""

    rank, size = 0, 1

    def allgather(self, value):
        return [value]

    def bcast(self, value):
        return value


class State:
    def __init__(self):
        self.tensors = {name: torch.arange(torch.Size(size).numel()).view(size).float() for name, size in SIZES.items()}

    def to_save(self):
        shards = {name: Shard(size, tuple(slice(0, n) for n in size)) for name, size in SIZES.items()}
        numbers = [Entry("optimizer/step/a.weight", Shard((), ()), torch.tensor(3.0))]
        return numbers + [Entry(name, shard, self.tensors[name]) for name, shard in shards.items()]


def make(folder: Path):
    folder.mkdir()
    error = Checkpointer(folder, Alone(), background=False).save(2, State(), {"grid": {"data": 1}, "config": {}})
    assert error is None, error


def read(folder: Path):
    """By whom everything is checked, and by whom just loads it."""
    path = folder / STEP
    node = index.read(path)
    for where, files in index.stored(node):
        for file in files:
            checks.check(where / file.name, file)
    found = {name: reading.whole(node, name).tolist() for name in node.manifest.tensors}
    verify(path)
    return found


def right(folder: Path, value) -> bool:
    return value == {name: tensor.tolist() for name, tensor in State().tensors.items()}


def sign(folder: Path, name: str, **more) -> None:
    """Tell the manifest above a file what its content is now."""
    path = folder / name
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if name == f"{STEP}/manifest.json":
        (folder / STEP / "manifest.sha256").write_text(f"{digest}  manifest.json\n")
        return
    above = (
        f"{STEP}/manifest.json"
        if name.count("/") == 1 or name == f"{GROUP}/manifest.json"
        else f"{GROUP}/manifest.json"
    )
    values = json.loads((folder / above).read_text())
    if name.endswith("holders.bin"):
        values["holders"] = digest
    else:
        values["parts"][0] |= {"bytes": len(content), "sha256": digest, **more}
    (folder / above).write_text(json.dumps(values))
    sign(folder, above, **more)


def mutate_manifest(folder: Path, generator: random.Random) -> str:
    name = generator.choice([RANK, RANK, f"{GROUP}/manifest.json", f"{STEP}/manifest.json"])
    tree = json.loads((folder / name).read_text())
    said = "; ".join(damage_json(tree, generator) for _ in range(generator.choice([1, 1, 2])))
    (folder / name).write_bytes(dumped(tree, generator))
    sign(folder, name)
    return f"{name}: {said}"


def mutate_table(folder: Path, generator: random.Random) -> str:
    name = generator.choice([f"{STEP}/holders.bin", f"{GROUP}/holders.bin"])
    path = folder / name
    if generator.randrange(4) == 0:
        said = damage_bytes(path, generator)
    else:
        rows = np.frombuffer(path.read_bytes(), "<i8").copy()
        place, value = generator.randrange(len(rows)), generator.choice([0, -1, 1, 3, 1 << 31, 1 << 62, -(1 << 63)])
        rows[place] = value if generator.randrange(2) else rows[place] + generator.choice([-1, 1])
        path.write_bytes(rows.tobytes())
        said = f"{place} is {rows[place]}"
    sign(folder, name)
    return f"{name}: {said}"


def mutate_bytes(folder: Path, generator: random.Random) -> str:
    """Not signed; files that are something else, and more of them."""
    path = generator.choice(sorted(path for path in folder.rglob("*") if not path.is_dir() and not path.is_symlink()))
    how = generator.choice(["bytes", "bytes", "bytes", "link", "folder", "missing", "more", "group is a link"])
    if how == "bytes":
        return damage_bytes(path, generator)
    if how == "more":
        path.with_name("precious.pkl").write_bytes(b"cos\nsystem\n(S'touch x'\ntR.")
    elif how == "group is a link":
        (folder / GROUP).rename(folder / "elsewhere")
        (folder / GROUP).symlink_to("../elsewhere")
    else:
        path.rename(folder / "elsewhere")
        if how == "link":
            path.symlink_to(folder / "elsewhere")
        if how == "folder":
            path.mkdir()
    return f"{path.name}: {how}"


def mutate_shards(folder: Path, generator: random.Random) -> str:
    """Files that HDF5 would follow elsewhere, with checksums of all that is not numbers as they then are."""
    path = folder / SHARDS
    how = generator.choice(["external link", "soft link", "virtual", "external storage", "bytes", "other file"])
    if how == "bytes":
        how = damage_bytes(path, generator)
    elif how == "other file":
        shutil.copy("/etc/passwd", path)
    else:
        with h5py.File(path, "r+") as file:
            name = generator.choice(list(SIZES)) + "x" * generator.randrange(2)
            names = [found for found in (f"{name}[0:3]", name) if found in file]
            for found in names:
                del file[found]
            where = generator.choice(["/etc/passwd", "../../../precious.txt", str(folder / "x.h5")])
            if how == "external link":
                file[name] = h5py.ExternalLink(where, "/")
            elif how == "soft link":
                file[name] = h5py.SoftLink(generator.choice(["/nowhere", "/", f"/{name}"]))
            elif how == "virtual":
                layout = h5py.VirtualLayout((3,), "f4")
                layout[:] = h5py.VirtualSource(where, "x", (3,))
                file.create_virtual_dataset(name, layout)
            else:
                file.create_dataset(name, (3,), "f4", external=[(where, 0, 12)])
    tree = json.loads((folder / RANK).read_text())
    (file,) = parse((folder / RANK).read_text()).files
    size = path.stat().st_size
    told = tree["files"][0]
    told |= {"bytes": size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    if size >= file.numbers()[-1][1]:
        told["crc32"] = checks.rest(path, size, file.numbers())
    (folder / RANK).write_text(json.dumps(tree))
    sign(folder, RANK, stored=size)
    return how


FORMATS = {
    "checkpoint": Format(make, mutate_manifest, read, right),
    "checkpoint table": Format(make, mutate_table, read, right),
    "checkpoint bytes": Format(make, mutate_bytes, read, right),
    "checkpoint shards": Format(make, mutate_shards, read, right),
}
