"""Fill a rank's memory from a checkpoint of any grid, reading just the slices that it needs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import torch

from hpctrain.shard import Shard
from hpctrain.state import Described, Entry, State
from hpctrain.train.checkpoint.manifest import DTYPES, Manifest, Piece
from hpctrain.train.checkpoint.shards import Reader


def load(folder: Path, manifest: Manifest, state: State) -> int:
    """Fill what the state needs. Returns how many bytes this rank read: whole blocks.

    Raises:
        Corrupt: naming the file that does not hold what the manifest says.
        OSError: when a file cannot be read, whatever it holds.
        ValueError: when the state needs tensors that are not there, or in another shape or type.
    """
    wanted: dict[str, list] = {file.name: [] for file in manifest.files}
    where = pieces_by_tensor(manifest)
    for entry in state.to_load(described(manifest)):
        if entry.name in manifest.scalars:
            entry.tensor.fill_(manifest.scalars[entry.name][1])
            continue
        filled = 0
        dtype = DTYPES[manifest.tensors[entry.name][0]]
        for name, piece in where[entry.name]:
            if (common := overlap(entry.shard.slices, piece.bounds)) is None:
                continue
            there, here = common
            part = entry.tensor.view(entry.shard.shape)[here]
            wanted[name].append((piece, dtype, there, part))
            filled += part.numel()
        assert filled == math.prod(entry.shard.shape), f"{entry.name}: {filled} of {entry.shard}"
    read = 0
    for name, parts in wanted.items():  # a file at a time: a job may open a thousand files, a checkpoint have more
        if parts:
            with Reader(folder / name) as reader:
                for piece, dtype, there, part in sorted(parts, key=lambda found: found[0].start):
                    reader.read(piece, dtype, there, part)
                read += reader.bytes
    return read


def described(manifest: Manifest) -> dict[str, Described]:
    """Shape and type of everything in a checkpoint."""
    tensors = {name: Described(shape, DTYPES[dtype]) for name, (dtype, shape) in manifest.tensors.items()}
    return tensors | {name: Described((), DTYPES[dtype]) for name, (dtype, _) in manifest.scalars.items()}


def pieces_by_tensor(manifest: Manifest) -> dict[str, list[tuple[str, Piece]]]:
    """For each tensor, (file name, piece) of its pieces."""
    where: dict[str, list] = {name: [] for name in manifest.tensors}
    for file in manifest.files:
        for name, pieces in file.pieces.items():
            where[name] += [(file.name, piece) for piece in pieces]
    return where


def overlap(slices: tuple[slice, ...], bounds) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
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


def whole(folder: Path, manifest: Manifest, name: str) -> torch.Tensor:
    """All of one tensor."""
    shape, dtype = described(manifest)[name]
    room = torch.empty(shape, dtype=dtype)
    load(folder, manifest, _One(Entry(name, Shard(shape, tuple(slice(0, size) for size in shape)), room)))
    return room


class _One(NamedTuple):
    entry: Entry

    def to_load(self, saved):
        return [self.entry]
