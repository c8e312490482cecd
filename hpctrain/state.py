"""The state of a training job, as checkpoints see it: named rectangles of global tensors, whoever holds them."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch

from hpctrain.shard import Shard, subsplit


@dataclass(frozen=True)
class Entry:
    """A rectangle of the global tensor `name`, and this rank's memory of it, contiguous; shaped so, or flat.

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
        """What this rank writes: over all ranks, each element of every global tensor once."""

    def to_load(self, saved: dict[str, Described]) -> list[Entry]:
        """Memory of all that this rank needs, to be filled. Elements that several ranks hold are needed by each."""

    def loaded(self) -> None:
        """All memory of all ranks has been filled. Collective."""


def part_of(entry: Entry, parts: int, index: int) -> Entry | None:
    """Range `index` of `parts` of an entry's rows; None where that is empty."""
    shard = entry.shard
    if not shard.global_shape:
        return entry if index == 0 else None
    rows = subsplit(shard.slices[0], parts, index)
    part = replace(shard, slices=(rows, *shard.slices[1:]))
    if not math.prod(part.shape):
        return None
    first = rows.start - shard.slices[0].start
    return Entry(entry.name, part, entry.tensor.view(shard.shape)[first : first + rows.stop - rows.start])


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
