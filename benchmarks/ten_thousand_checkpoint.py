"""Part of ten_thousand.py: what a checkpoint costs its busiest rank besides the numbers in it.

Of a model of 600 parameters of 1,024 × 1,024 with AdamW: replicas that all have it (ddp), and replicas that share each
parameter (zero1), where every rank has a piece of every tensor. Manifests are made and read by the package's functions,
with files that do not exist: of ddp all, of zero1 those of the first group and the checkpoint's, to which the other
groups report what they would have.
"""

import functools
import os
import pickle
import tempfile
import time
import tracemalloc
from pathlib import Path

import numpy as np
import torch

from hpctrain.checkpoint import index, manifests, reading
from hpctrain.checkpoint.pieces import File, StoredPiece
from hpctrain.shard import Shard, split
from hpctrain.shard_entries import Entry, rectangles, replicas_part

PARAMETERS, SIDE = 600, 1024
NAMES = [f"{kind}/block-{n}.weight" for kind in ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq")
         for n in range(PARAMETERS)]  # fmt: skip
WHOLE = Shard((SIDE, SIDE), (slice(0, SIDE), slice(0, SIDE)))
NUMBERS = torch.empty(SIDE, SIDE, device="meta")
REPLICAS = [Entry(name, WHOLE, NUMBERS) for name in NAMES]
SECONDS, MEMORY, FILES = 1.0, 100_000_000, 1000  # limits


def entries(method, ranks, rank):
    """What a rank saves, and loads: of ddp all load everything."""
    if method == "ddp":
        return replicas_part(REPLICAS, ranks, rank)
    mine = split(SIDE * SIDE, ranks, rank)
    parts = [(part, NUMBERS.view(-1)[: torch.Size(part.shape).numel()]) for part in
             rectangles(WHOLE, mine.start, mine.stop)]  # fmt: skip
    return [Entry(name, part, numbers) for name in NAMES for part, numbers in parts]


def cost(action):
    """(result, seconds, bytes of memory) of an action that can be done twice; tracing memory takes time."""
    action()
    start = time.process_time()
    action()
    seconds = time.process_time() - start
    tracemalloc.start()
    result = action()
    memory = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return result, seconds, memory


def again(*paths):
    """Files are never overwritten."""
    for path in paths:
        path.unlink(missing_ok=True)


def summary(folder, method, ranks, rank):
    """A rank's part of a save, but for its files."""
    tensors, pieces, place = {}, {}, 2048
    for entry in entries(method, ranks, rank):
        bounds = tuple((part.start, part.stop) for part in entry.shard.slices)
        tensors[entry.name] = ("float32", entry.shard.global_shape)
        sums = [0] * -(-entry.tensor.nbytes // (1 << 20))
        pieces.setdefault(entry.name, []).append(StoredPiece(bounds, place, place + entry.tensor.nbytes, sums))
        place += entry.tensor.nbytes
    files = [File(f"rank-{rank:05d}.h5", place, "0" * 64, 0, pieces)] if pieces else []
    path = folder / manifests.group_name(rank // manifests.GROUP)
    path.mkdir(exist_ok=True)
    again(path / manifests.rank_name(rank))
    return index.write_rank(path, 1, rank, tensors, {}, files)


def group_summary(folder, reported, members):
    """A group's manifest, from what its ranks sent."""
    path = folder / manifests.group_name(members[0] // manifests.GROUP)
    path.mkdir(exist_ok=True)
    again(path / manifests.NAME, path / manifests.HOLDERS)
    return index.write_group(path, 1, [pickle.loads(text) for text in reported])


def checkpoint_summary(folder, reported):
    again(*(folder / name for name in (manifests.NAME, manifests.SUM, manifests.HOLDERS)))
    return index.write(folder, 1, [pickle.loads(text) for text in reported], {})


def as_if(first, ranks, members):
    """What a group of zero1 would report, from what the first one reported."""
    flat = slice(split(SIDE * SIDE, ranks, members[0]).start, split(SIDE * SIDE, ranks, members[-1]).stop)
    parts = rectangles(WHOLE, flat.start, flat.stop)
    table = first.rows.copy()
    table[:, 2:] = [flat.stop - flat.start, *(min(part.slices[dim].start for part in parts) for dim in range(2)),
                    *(max(part.slices[dim].stop for part in parts) for dim in range(2))]  # fmt: skip
    name = f"{manifests.group_name(members[0] // manifests.GROUP)}/{manifests.NAME}"
    part = manifests.ManifestPart(name, first.part.bytes, first.part.sha256, len(members), first.part.stored)
    return index.Summary(part, first.tensors, table, {})


def save(folder, method, ranks):
    """For each level of the tree (its name, seconds, memory, messages, bytes of them), of the busiest group."""
    own, seconds, memory = cost(lambda: summary(folder, method, ranks, 0))
    yield "a rank", seconds, memory, 0, 0
    groups, busiest = [], None
    for start in range(0, ranks, manifests.GROUP):
        members = range(start, min(ranks, start + manifests.GROUP))
        if start and method == "zero1":
            groups.append(as_if(groups[0], ranks, members))
            continue
        sent = [pickle.dumps(summary(folder, method, ranks, rank) if rank else own) for rank in members]
        if start:
            groups.append(group_summary(folder, sent, members))
        else:
            result, *busiest = cost(lambda sent=sent, members=members: group_summary(folder, sent, members))
            groups.append(result)
            busiest += [len(sent) - 1, sum(map(len, sent[1:]))]
    yield "the first of a group", *busiest
    sent = [pickle.dumps(each) for each in groups]
    _, seconds, memory = cost(lambda: checkpoint_summary(folder, sent))
    yield "rank 0", seconds, memory, len(sent) - 1, sum(map(len, sent[1:]))


def find(folder, wanted):
    """As `reading.load` does, but for the files: bytes of manifests read, files opened, pieces looked at."""
    bounds = {}
    for entry in wanted:
        bounds.setdefault(entry.name, []).append([(part.start, part.stop) for part in entry.shard.slices])
    bounds = {name: np.array(found) for name, found in bounds.items()}
    node, read, opened, pieces = index.read(folder), 0, 3, 0
    read += sum((folder / name).stat().st_size for name in ("manifest.json", "holders.bin"))
    for number in reading._parts(node.holders, bounds):
        group = index.read_group(node, number)
        opened += 2
        read += sum((group.folder / name).stat().st_size for name in ("manifest.json", "holders.bin"))
        for of_rank in reading._parts(group.holders, bounds):
            rank = index.read_rank(group, of_rank)
            opened += 1 + len(rank.files)
            read += group.manifest.parts[of_rank].bytes
            pieces += sum(len(found) for file in rank.files for found in file.pieces.values())
    return read, opened, pieces


def rows(ranks):
    for method in ("ddp", "zero1"):
        with tempfile.TemporaryDirectory() as home:
            folder = Path(home) / "step-1"
            folder.mkdir()
            for level, seconds, memory, messages, size in save(folder, method, ranks):
                case = f"{method}, save, {level}"
                yield row(f"{case}: seconds", seconds, "s", SECONDS)
                yield row(f"{case}: memory", memory, "bytes", MEMORY)
                if messages:
                    yield row(f"{case}: messages received", messages, "messages", FILES)
                    yield row(f"{case}: received", size, "bytes", MEMORY)
            most = max(len(names) + len(below) for _, below, names in os.walk(folder))
            yield row(f"{method}, save: most names in a folder, without shards", most, "names", FILES)
            for what, count in (("the same ranks", ranks), ("half as many", ranks // 2)):
                wanted = entries(method, count, 1)
                if method == "ddp":  # everybody loads all of it
                    wanted = REPLICAS
                (read, opened, pieces), seconds, memory = cost(functools.partial(find, folder, wanted))
                case = f"{method}, resume on {what}"
                yield row(f"{case}: seconds", seconds, "s", 3 * SECONDS)
                yield row(f"{case}: memory", memory, "bytes", MEMORY)
                yield row(f"{case}: manifests read", read, "bytes", MEMORY)
                yield row(f"{case}: files opened", opened, "files", 4 * FILES)
                yield row(f"{case}: pieces looked at", pieces, "pieces", None)


def row(case, value, unit, limit):
    return {"case": case, "value": round(value, 4), "unit": unit, "limit": limit}
