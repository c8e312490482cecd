"""The state of a training job, as checkpoints see it: named rectangles of global tensors, whoever holds them."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch

from hpctrain.shard import Shard


@dataclass(frozen=True)
class Entry:
    """A rectangle of the global tensor `name`, and this rank's memory of it, shaped so, or flat; contiguous where it is
    to be saved.

    Names are "model/PARAMETER" and "optimizer/KEY/PARAMETER". A number, such as a loss scale, is a tensor without dims,
    on one rank, the others having none to save; all ranks load it.
    """

    name: str
    shard: Shard
    tensor: torch.Tensor


class Described(NamedTuple):
    """A global tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class State(Protocol):
    """What can be saved and loaded. ZeRO's flat shards are entries by way of `rectangles`."""

    def to_save(self) -> list[Entry]:
        """What this rank writes: over all ranks, each element of every global tensor once. Communicates nothing."""

    def to_load(self, saved: dict[str, Described]) -> list[Entry]:
        """Memory of all that this rank needs, to be filled. Elements that several ranks hold are needed by each."""

    def loaded(self) -> None:
        """All memory of all ranks has been filled. Collective."""


LEAST = 4 << 20  # bytes that a replica saves, or none; a thousand small files serve nobody


def replicas_part(entries: list[Entry], parts: int, index: int) -> list[Entry]:
    """What replica `index` of `parts` saves of entries that all of them have: about as many bytes as the others.

    The entries' rows are cut one after another into as many ranges as there are writers, so that most tensors are in
    one piece, whatever the number of replicas. Writers lie as far apart as they can. The first has the numbers, and the
    tensors without elements, which no range of rows meets.
    """
    tensors = [entry for entry in entries if entry.shard.global_shape]
    total = sum(entry.tensor.nbytes for entry in tensors)
    writers = min(parts, max(1, total // LEAST))
    writer = index * writers // parts
    if -(-writer * parts // writers) != index:
        return []
    first, last, end = total * writer // writers, total * (writer + 1) // writers, 0
    first_has = [entry for entry in entries if not entry.shard.global_shape or 0 in entry.shard.global_shape]
    chosen = first_has if writer == 0 else []
    for entry in tensors:
        begin, end = end, end + entry.tensor.nbytes
        if max(first, begin) >= min(last, end):
            continue
        rows = entry.shard.shape[0]
        row = (end - begin) // rows
        start, stop = (min(max(-(-(edge - begin) // row), 0), rows) for edge in (first, last))
        if start < stop:
            chosen.append(_rows(entry, start, stop))
    return chosen


def _rows(entry: Entry, start: int, stop: int) -> Entry:
    shard, origin = entry.shard, entry.shard.slices[0].start
    part = replace(shard, slices=(slice(origin + start, origin + stop), *shard.slices[1:]))
    return Entry(entry.name, part, entry.tensor.view(shard.shape)[start:stop])


def rectangles(shard: Shard, start: int, stop: int) -> list[Shard]:
    """Elements `start` to `stop`, in row-major order, of the slice that `shard` says, as rectangles in that order.

    >>> shard = Shard((9, 10), (slice(2, 6), slice(5, 10)))
    >>> [part.slices for part in rectangles(shard, 3, 16)]
    [(slice(2, 3, None), slice(8, 10, None)), (slice(3, 5, None), slice(5, 10, None)),
     (slice(5, 6, None), slice(5, 6, None))]
    """
    if stop <= start:
        return []
    shape = shard.shape
    if not shape:
        return [shard]
    row = math.prod(shape[1:])
    origin = shard.slices[0].start
    if row == 1 or (start % row == 0 and stop % row == 0):
        rows = slice(origin + start // row, origin + -(-stop // row))
        return [replace(shard, slices=(rows, *shard.slices[1:]))]
    # up to the end of the first row, whole rows, what is left
    cuts = sorted({start, stop, *(c for c in (-(-start // row) * row, stop // row * row) if start < c < stop)})
    parts = []
    for begin, end in itertools.pairwise(cuts):
        if begin % row == 0 and end % row == 0:
            parts += rectangles(shard, begin, end)
            continue
        place = begin // row
        inner = Shard(shard.global_shape[1:], shard.slices[1:])
        for part in rectangles(inner, begin - place * row, end - place * row):
            parts.append(replace(shard, slices=(slice(origin + place, origin + place + 1), *part.slices)))
    return parts
