"""What a checkpoint sees of a training job: named rectangles of global tensors, and numbers."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch

from hpctrain.shard import Shard, subsplit


@dataclass(frozen=True)
class Entry:
    """A rectangle of the global tensor `name`, and this rank's memory of it; shaped as the rectangle, or flat."""

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


class TrainingState:
    """The parameters of a model, each with its `Shard`, and an optimizer's state, addressed by parameter name.

    A replica writes its part of the rows of every slice, so that all ranks write about equally much.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, grid):
        self.grid, self.optimizer = grid, optimizer
        # tied parameters have one name, that of the stage which counts them
        self.parameters = {getattr(p, "same_as", name): p for name, p in model.named_parameters()}

    def to_save(self) -> list[Entry]:
        data = self.grid.data
        owned = {name: p for name, p in self.parameters.items() if p.shard.owned(self.grid.coords)}
        entries = [Entry(f"model/{name}", p.shard, p.detach()) for name, p in owned.items()]
        for name, p in owned.items():
            for key, value in self.optimizer.state[p].items():
                shard = p.shard if value.shape == p.shape else Shard((), ())
                entries.append(Entry(f"optimizer/{key}/{name}", shard, value))
        return [part for entry in entries if (part := part_of(entry, data.size, data.rank))]

    def to_load(self, saved: dict[str, Described]) -> list[Entry]:
        """Makes the optimizer's state anew, with what the checkpoint has of it.

        Raises:
            ValueError: listing all parameters that the checkpoint lacks or has in another shape or type.
        """
        wrong = []
        entries = []
        self.optimizer.state.clear()
        kept = [(key.split("/", 2)[1:], value) for key, value in saved.items() if key.startswith("optimizer/")]
        states: dict[str, list] = {}
        for (key, name), value in kept:
            states.setdefault(name, []).append((key, value))
        for name, p in self.parameters.items():
            here, there = Described(p.shard.global_shape, p.dtype), saved.get(f"model/{name}")
            if here != there:
                wrong.append(f"{name}: {_said(here)} in the model, {_said(there)} in the checkpoint")
                continue
            entries.append(Entry(f"model/{name}", p.shard, p.detach()))
            for key, value in states.get(name, ()):
                shard = p.shard if value.shape == p.shard.global_shape else Shard((), ())
                device = p.device if value.shape == p.shard.global_shape else None  # as torch's own optimizers have it
                room = torch.empty(shard.shape, dtype=value.dtype, device=device)
                self.optimizer.state[p][key] = room
                entries.append(Entry(f"optimizer/{key}/{name}", shard, room))
        if wrong:
            raise ValueError("the checkpoint is of another model:\n  " + "\n  ".join(wrong))
        return entries


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


def _said(described: Described | None) -> str:
    if described is None:
        return "missing"
    return f"{'×'.join(map(str, described.shape))} {str(described.dtype).removeprefix('torch.')}"
