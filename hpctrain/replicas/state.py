"""The state of a model that every replica holds whole, and of its optimizer, for checkpoints."""

from __future__ import annotations

import torch

from hpctrain.shard import Shard
from hpctrain.state import Described, Entry, part_of


def to_save(names: dict[torch.nn.Parameter, str], optimizer, grid) -> list[Entry]:
    """This rank's part: every replica writes some of the rows of a slice, so that all ranks write about as much."""
    owned = [p for p in names if p.shard.owned(grid.coords)]
    entries = [Entry(f"model/{names[p]}", p.shard, p.detach()) for p in owned]
    for p in owned:
        for key, value in optimizer.state[p].items():
            shard = p.shard if value.shape == p.shape else Shard((), ())
            entries.append(Entry(f"optimizer/{key}/{names[p]}", shard, value))
    parts = (part_of(entry, grid.data.size, grid.data.rank) for entry in entries)
    return [part for part in parts if part]


def to_load(names: dict[torch.nn.Parameter, str], optimizer, saved: dict[str, Described]) -> list[Entry]:
    """Memory of the parameters, and of an optimizer's state made anew with what the checkpoint has of it.

    Raises:
        ValueError: listing all parameters that the checkpoint lacks or has in another shape or type.
    """
    check_parameters(names, saved)
    kept: dict[str, list] = {}
    for name, value in saved.items():
        if name.startswith("optimizer/"):
            _, key, parameter = name.split("/", 2)
            kept.setdefault(parameter, []).append((key, value))
    optimizer.state.clear()
    entries = []
    for p, name in names.items():
        entries.append(Entry(f"model/{name}", p.shard, p.detach()))
        for key, value in kept.get(name, ()):
            like = value.shape == p.shard.global_shape
            shard, device = (p.shard, p.device) if like else (Shard((), ()), None)  # torch has numbers on the host
            room = optimizer.state[p][key] = torch.empty(shard.shape, dtype=value.dtype, device=device)
            entries.append(Entry(f"optimizer/{key}/{name}", shard, room))
    return entries


def check_parameters(names: dict[torch.nn.Parameter, str], saved: dict[str, Described]) -> None:
    """Raise ValueError listing every parameter that is not there in the shape and type that the model has."""
    wrong = []
    for p, name in names.items():
        here, there = Described(p.shard.global_shape, p.dtype), saved.get(f"model/{name}")
        if here != there:
            wrong.append(f"{name}: {_said(here)} in the model, {_said(there)} in the checkpoint")
    if wrong:
        raise ValueError("the checkpoint is of another model:\n  " + "\n  ".join(wrong))


def _said(described: Described | None) -> str:
    if described is None:
        return "missing"
    return f"{'×'.join(map(str, described.shape))} {str(described.dtype).removeprefix('torch.')}"
