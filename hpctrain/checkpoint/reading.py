"""Fill a rank's memory from a checkpoint of any grid, reading just the slices that it needs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from hpctrain.checkpoint import index
from hpctrain.checkpoint.holders import Holders
from hpctrain.checkpoint.index import Node
from hpctrain.checkpoint.manifests import NAME, Manifest
from hpctrain.checkpoint.pieces import DTYPES, Bounds, Corrupt, RankManifest
from hpctrain.checkpoint.shards import Reader
from hpctrain.shard import Shard
from hpctrain.shard_entries import Described, Entry


class Wanted(NamedTuple):
    """A rectangle to be filled, and those in it that were, counted from its corner."""

    entry: Entry
    filled: list[tuple[slice, ...]]


def load(node: Node, entries: list[Entry]) -> int:
    """Fill what a state needs. Returns how many bytes of shards this rank read: whole blocks.

    Raises:
        Corrupt: naming the file that does not hold what the manifest says.
        OSError: when a file cannot be read, whatever it holds.
    """
    wanted: dict[str, list[Wanted]] = {}
    for entry in entries:
        if entry.name in node.manifest.scalars:
            entry.tensor.fill_(node.manifest.scalars[entry.name][1])
        elif entry.tensor.numel():
            wanted.setdefault(entry.name, []).append(Wanted(entry, []))
    bounds = {
        name: np.array([[(s.start, s.stop) for s in want.entry.shard.slices] for want in wants])
        for name, wants in wanted.items()
    }
    read = 0
    for number in _parts(node.holders, bounds):
        group = index.read_group(node, number)
        for of_rank in _parts(group.holders, bounds):
            read += _read(group.folder, index.read_rank(group, of_rank), wanted)
    for name, wants in wanted.items():
        for want in wants:
            _check_filled(node.folder / NAME, name, want)
    return read


def _parts(holders: Holders, bounds: dict[str, np.ndarray]) -> list[int]:
    """Numbers of the parts that may hold something of it."""
    found = [holders.find(name, rectangles) for name, rectangles in bounds.items()]
    return np.unique(np.concatenate(found)).tolist() if found else []


def _read(folder: Path, rank: RankManifest, wanted: dict[str, list[Wanted]]) -> int:
    """Fill what one rank's files hold of it: a file at a time, since a job may open a thousand."""
    read = 0
    for file in rank.files:
        parts = []
        for name in file.pieces.keys() & wanted.keys():
            dtype = DTYPES[rank.tensors[name][0]]
            for piece in file.pieces[name]:
                for want in wanted[name]:
                    if (common := overlap(want.entry.shard.slices, piece.bounds)) is not None:
                        there, here = common
                        want.filled.append(here)
                        parts.append((piece, dtype, there, want.entry.tensor.view(want.entry.shard.shape)[here]))
        if parts:
            with Reader(folder / file.name) as reader:
                for piece, dtype, there, part in sorted(parts, key=lambda found: found[0].start):
                    reader.read(piece, dtype, there, part)
                read += reader.bytes
    return read


def _check_filled(path: Path, name: str, want: Wanted) -> None:
    """Every element of it, once."""
    count = sum(math.prod(part.stop - part.start for part in here) for here in want.filled)
    if count != want.entry.tensor.numel():
        raise Corrupt(f"{path}: the files hold {count} of {want.entry.tensor.numel()} elements of {name}")
    if any_meet(np.array([[(part.start, part.stop) for part in here] for here in want.filled])):
        raise Corrupt(f"{path}: two pieces of {name} overlap")


def any_meet(bounds: np.ndarray) -> bool:
    """Whether two of the rectangles (number, dim, start and stop) share an element. Their memory is all it takes: they
    are ordered along the dim that has most starts, and each is compared with those that begin before it ends."""
    if len(bounds) < 2:
        return False
    along = max(range(bounds.shape[1]), key=lambda dim: len(np.unique(bounds[:, dim, 0])))
    bounds = bounds[bounds[:, along, 0].argsort()]
    after = bounds[:, along, 0].searchsorted(bounds[:, along, 1])
    return any(
        ((one[:, 0] < others[..., 1]) & (others[..., 0] < one[:, 1])).all(1).any()
        for one, others in ((bounds[n], bounds[n + 1 : after[n]]) for n in range(len(bounds)))
    )


def described(manifest: Manifest) -> dict[str, Described]:
    """Shape and type of everything in a checkpoint."""
    tensors = {name: Described(shape, DTYPES[dtype]) for name, (dtype, shape) in manifest.tensors.items()}
    return tensors | {name: Described((), DTYPES[dtype]) for name, (dtype, _) in manifest.scalars.items()}


def overlap(slices: tuple[slice, ...], bounds: Bounds) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """What two rectangles share, counted from the corner of `bounds` and from that of `slices`; None for nothing.

    >>> overlap((slice(2, 9),), ((5, 20),))
    ((slice(0, 4, None),), (slice(3, 7, None),))
    """
    there, here = [], []
    for mine, (start, stop) in zip(slices, bounds):
        low, high = max(mine.start, start), min(mine.stop, stop)
        if low >= high:
            return None
        there.append(slice(low - start, high - start))
        here.append(slice(low - mine.start, high - mine.start))
    return tuple(there), tuple(here)


def whole(node: Node, name: str) -> torch.Tensor:
    """All of one tensor."""
    shape, dtype = described(node.manifest)[name]
    tensor = torch.empty(shape, dtype=dtype)
    load(node, [Entry(name, Shard.whole(shape), tensor)])
    return tensor
