"""The state of a model and of its optimizer, as it goes into checkpoints."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hpctrain.grid import Grid
from hpctrain.parameter import shard_of
from hpctrain.shard import Shard
from hpctrain.shard_entries import Described, Entry, rectangles, replicas_part

Names = dict[torch.nn.Parameter, str]
SINCE_AVERAGE = "steps_since_average"  # a number of checkpoints in which each replica has its own weights


# Whole on every replica ---------------------------------------------------------------------------------------------


def to_save(names: Names, optimizer: torch.optim.Optimizer, grid: Grid) -> list[Entry]:
    """This rank's part of what all replicas have."""
    return _part([*_parameters(names, grid), *_states(names, optimizer, grid)], grid)


def to_load(names: Names, optimizer: torch.optim.Optimizer, saved: dict[str, Described]) -> list[Entry]:
    """Memory of the parameters, and of an optimizer's state made anew with what the checkpoint has of it.

    Raises:
        ValueError: listing all parameters that the checkpoint lacks or has in another shape or type; where it is of
            another optimizer.
    """
    entries = parameters_to_load(names, saved)
    kept = _kept_states(saved)
    _check_states(optimizer, kept, names)
    optimizer.state.clear()
    on_device = _with_numbers_on_device(optimizer)
    for p, name in names.items():
        for key, value in kept.get(name, ()):
            shard = shard_of(p) if value.shape else Shard((), ())
            device = None if _is_number(key, value, p) and p not in on_device else p.device
            shape = p.detach().shape if value.shape else ()
            memory = optimizer.state[p][key] = torch.empty(shape, dtype=value.dtype, device=device)
            entries.append(Entry(f"optimizer/{key}/{name}", shard, memory))
    return entries


def parameters_to_save(names: Names, grid: Grid) -> list[Entry]:
    return _part(_parameters(names, grid), grid)


def parameters_to_load(names: Names, saved: dict[str, Described]) -> list[Entry]:
    """Raises ValueError listing every parameter that is not there in the shape and type that the model has."""
    entries = [Entry(f"model/{name}", shard_of(p), p.detach()) for p, name in names.items()]
    _check(entries, saved)
    return entries


def _part(entries, grid):
    """Of those that others have as well."""
    return [
        entry
        for axis in (grid.data, grid.copies)
        for entry in replicas_part([e for e in entries if e.shard.alike == axis.name], axis.size, axis.rank)
    ]


def _parameters(names, grid):
    return [
        Entry(f"model/{name}", shard_of(p), p.detach()) for p, name in names.items() if shard_of(p).owned(grid.coords)
    ]


def _states(names, optimizer, grid):
    """Numbers on the rank that has the first element of their parameter."""
    return [
        Entry(f"optimizer/{key}/{name}", shard_of(p) if value.dim() else Shard((), ()), value)
        for p, name in names.items()
        if shard_of(p).owned(grid.coords)
        for key, value in _state_of(optimizer, p)
        if value.dim() or not any(part.start for part in shard_of(p).slices)
    ]


def _state_of(optimizer, parameter) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors by key, none of a parameter that it does not train, to which asking by index would give an entry."""
    for key, value in optimizer.state.get(parameter, {}).items():
        if isinstance(value, torch.Tensor):
            yield key, value
        elif value is not None:
            raise ValueError(
                f"{type(optimizer).__name__} keeps {key!r} of a parameter as {value!r}; checkpoints hold tensors "
                "alone: let the optimizer keep one, torch.tensor(...)"
            )


# In pieces ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ParameterSlice:
    """Elements `start` to `stop`, in row-major order, of this rank's slice of a parameter; others have other elements.

    Attributes: `local`, the optimizer's parameter for them, flat.
    """

    parameter: torch.nn.Parameter
    start: int
    stop: int
    local: torch.nn.Parameter

    def entries(self, name: str, flat: torch.Tensor) -> list[Entry]:
        """A flat tensor of this piece, as rectangles of the global tensor `name`."""
        parts = rectangles(shard_of(self.parameter), self.start, self.stop)
        ends = itertools.accumulate((torch.Size(part.shape).numel() for part in parts), initial=0)
        return [Entry(name, part, flat[a:b]) for part, (a, b) in zip(parts, itertools.pairwise(ends))]


def pieces_to_save(
    names: Names, pieces: list[ParameterSlice], optimizer: torch.optim.Optimizer, grid: Grid, weights: bool
) -> list[Entry]:
    """The optimizer's state, and its `weights`; numbers are saved with the first piece of a parameter."""
    entries = []
    for piece in pieces:
        if not shard_of(piece.parameter).owned(grid.coords):
            continue
        if weights:
            entries += piece.entries(f"model/{names[piece.parameter]}", piece.local.detach())
        for key, value in _state_of(optimizer, piece.local):
            name = f"optimizer/{key}/{names[piece.parameter]}"
            if value.dim():
                entries += piece.entries(name, value.view(-1))
            elif piece.start == 0:
                entries.append(Entry(name, Shard((), ()), value))
    return entries


def pieces_to_load(
    names: Names,
    pieces: list[ParameterSlice],
    optimizer: torch.optim.Optimizer,
    saved: dict[str, Described],
    weights: bool,
):
    """Raises ValueError as `parameters_to_load`, where the `weights` are to be loaded too."""
    kept = _kept_states(saved)
    entries = []
    if weights:
        for piece in pieces:
            entries += piece.entries(f"model/{names[piece.parameter]}", piece.local.detach())
        _check(entries, saved)
    _check_states(optimizer, kept, {piece.local: names[piece.parameter] for piece in pieces})
    optimizer.state.clear()
    on_device = _with_numbers_on_device(optimizer)
    for piece in pieces:
        for key, value in kept.get(names[piece.parameter], ()):
            name = f"optimizer/{key}/{names[piece.parameter]}"
            number = _is_number(key, value, piece.parameter)
            shape = () if number else (piece.stop - piece.start,)
            device = None if number and piece.local not in on_device else piece.local.device
            memory = optimizer.state[piece.local][key] = torch.empty(shape, dtype=value.dtype, device=device)
            entries += [Entry(name, Shard((), ()), memory)] if number else piece.entries(name, memory)
    return entries


# Each replica its own ------------------------------------------------------------------------------------------------


def own_to_save(names: Names, optimizer: torch.optim.Optimizer, grid: Grid) -> list[Entry]:
    """With the replicas as a dim before the others, so that only as many of them can go on from it."""
    if grid.sequence.rank:  # the ranks that share sequences have the same
        return []
    entries = [*_parameters(names, grid), *_states(names, optimizer, grid)]
    return [_of_replica(entry, grid) for entry in entries]


def own_to_load(names: Names, optimizer: torch.optim.Optimizer, saved: dict[str, Described], grid: Grid) -> list[Entry]:
    """Where all replicas have the same in the checkpoint, each begins with that. Raises ValueError as `to_load`, and
    for another number of replicas."""
    if SINCE_AVERAGE not in saved:
        return to_load(names, optimizer, saved)
    if counts := {value.shape[0] for value in saved.values() if value.shape} - {grid.replica.size}:
        raise ValueError(
            f"the checkpoint holds {min(counts)} replicas that trained by themselves; use grid.data={min(counts)}"
        )
    one = {name: Described(value.shape[1:], value.dtype) for name, value in saved.items() if name != SINCE_AVERAGE}
    return [_of_replica(entry, grid) for entry in to_load(names, optimizer, one)]


def _of_replica(entry, grid):
    shard, rank, size = entry.shard, grid.replica.rank, grid.replica.size
    one = slice(rank, rank + 1)
    whole = dataclasses.replace(shard, global_shape=(size, *shard.global_shape), slices=(one, *shard.slices))
    return Entry(entry.name, whole, entry.tensor.view(whole.shape))


# ---------------------------------------------------------------------------------------------------------------------


def _kept_states(saved) -> dict[str, list]:
    """Key and description of the optimizer's tensors, by parameter."""
    kept: dict[str, list] = {}
    for name, value in saved.items():
        if name.startswith("optimizer/"):
            _, key, parameter = name.split("/", 2)
            kept.setdefault(parameter, []).append((key, value))
    return kept


def _check_states(optimizer, kept, names: Names) -> None:
    """Raise ValueError where the optimizer would miss tensors, finding others."""
    for group in optimizer.param_groups:
        found = {name: {key for key, _ in kept.get(name, ())} for name in (names.get(p) for p in group["params"])}
        if not any(found.values()):
            continue
        needed = _keys_of_state(optimizer, group)
        for name, keys in found.items():
            if keys and (missing := needed - keys):
                raise ValueError(
                    f"the checkpoint is of another optimizer (train.optimizer): it has {', '.join(sorted(keys))} of "
                    f"{name}, without the {', '.join(sorted(missing))} that {type(optimizer).__name__} needs"
                )


def _keys_of_state(optimizer, group: dict) -> set[str]:
    """Of an optimizer's state of a parameter after a step: known from a copy's, of a group with one number."""
    return {key for key, value in _after_a_step(optimizer, group)[0].items() if value is not None}


def counted_in_groups(optimizer: torch.optim.Optimizer) -> set[str]:
    """The numbers that a step of the optimizer changes in its groups, which are no state of any parameter; none where
    nobody can tell, as its step needs more than a gradient."""
    found: set[str] = set()
    for group in optimizer.param_groups:
        if group["params"]:
            with contextlib.suppress(Exception):
                after = _after_a_step(optimizer, group)[1]
                numbers = {key: value for key, value in group.items() if isinstance(value, (int, float))}
                found |= {key for key, value in numbers.items() if after.get(key) != value}
    return found


def _after_a_step(optimizer, group) -> tuple[dict, dict]:
    """State and options of a copy of the optimizer, after a step of a number without a gradient to speak of."""
    number = torch.nn.Parameter(group["params"][0].detach().new_zeros(1))
    number.grad = torch.zeros_like(number)
    options = copy.deepcopy({key: value for key, value in group.items() if key != "params"})
    alone = object.__new__(type(optimizer))
    vars(alone).update(vars(optimizer))
    alone.state, alone.param_groups = collections.defaultdict(dict), [{**options, "params": [number]}]
    alone._optimizer_step_pre_hooks, alone._optimizer_step_post_hooks = {}, {}
    type(optimizer).step(alone)  # its own may be wrapped, as by schedulers
    return alone.state[number], alone.param_groups[0]


def _with_numbers_on_device(optimizer) -> set[torch.nn.Parameter]:
    """Parameters whose numbers, such as that of steps, torch's kernels take from the device, not from the host."""
    groups = [group for group in optimizer.param_groups if group.get("fused") or group.get("capturable")]
    return {p for group in groups for p in group["params"]}


def _is_number(key: str, value: Described, parameter: torch.nn.Parameter) -> bool:
    """Whether that part of the state is one of the parameter, as a whole; of one without dims only the steps are."""
    return not value.shape and (bool(shard_of(parameter).global_shape) or key == "step")


def _check(entries, saved) -> None:
    if SINCE_AVERAGE in saved:
        raise ValueError(
            "each replica has weights of its own in the checkpoint, as it is of data_parallel.method=local_sgd; go on "
            "with that method, and as many replicas"
        )
    wrong = {}
    for entry in entries:
        here, there = Described(entry.shard.global_shape, entry.tensor.dtype), saved.get(entry.name)
        if here != there:
            wrong[entry.name] = f"{entry.name}: {_described(here)} in the model, {_described(there)} in the checkpoint"
    if wrong:
        raise ValueError("the checkpoint is of another model:\n  " + "\n  ".join(wrong.values()))


def _described(described: Described | None) -> str:
    if described is None:
        return "missing"
    return f"{'×'.join(map(str, described.shape))} {str(described.dtype).removeprefix('torch.')}"
