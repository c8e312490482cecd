"""Checked mode: before every collective its ranks compare what they are about to do."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from hpctrain.grid import Axis, Grid
from hpctrain.reclaim import free_comm

_NOT_CALLERS = (str(Path(__file__).parent), str(Path(torch.__file__).parent))  # autograd calls our functions

# Dims of the tensors in which ranks may differ, by the counts that are given, or that a buffer or workspace has.
_FREE = {
    "all_gather": 0, "gather": 0, "gather_counted": 0, "scatter": 0, "all_to_all": 0, "rows_to_columns": 0,
    "gather_columns": 1, "columns_to_rows": 1, "rows_to_slices": 2, "slices_to_rows": 1, "rotate": 0,
}  # fmt: skip
_POINT_TO_POINT = ("send", "recv", "recv_any", "probe")
_BETWEEN_NEIGHBOURS = ("exchange", "adjoint", "all_to_all", "read")  # counts and shapes are each rank's own


class Mismatch(RuntimeError):
    """Raised on every rank of the axis, before anything is sent."""


class CollectiveChecker:
    """Makes every collective along any axis of the grid a checked one. Made by all ranks; costs a message a call."""

    def __init__(self, grid: Grid):
        self._grid = grid
        self._comms = {axis.name: axis.comm.Dup() for axis in grid.axes() if axis.size > 1}
        for comm in self._comms.values():
            grid.transport.holdings.add(free_comm(comm))
        grid.transport.checker = self

    def __call__(self, axis: Axis, name: str, arguments: tuple, options: dict) -> None:
        """Agree on the operation, its arguments, and the line that calls it.

        Raises:
            Mismatch: on every rank of the axis, naming the ranks that differ from most of the others.
        """
        if axis.size == 1 or name in _POINT_TO_POINT:
            return
        calls = self._comms[axis.name].allgather(f"{name}({_said(axis, name, arguments, options)}) at {caller()}")
        usual, count = Counter(calls).most_common(1)[0]
        if count == len(calls):
            return
        members = self._grid.members(axis.name)
        odd = [f"rank {members[place]} calls {call}" for place, call in enumerate(calls) if call != usual]
        same = [str(members[place]) for place, call in enumerate(calls) if call == usual]
        raise Mismatch(f"along {axis.name}: {'; '.join(odd)}; rank {', '.join(same)} calls {usual}")


def _said(axis: Axis, name: str, arguments: tuple, options: dict) -> str:
    owner, given = arguments[0], (*arguments, *options.values())
    counted = not isinstance(owner, torch.Tensor) or any(isinstance(value, (list, tuple)) for value in given)
    if not isinstance(owner, torch.Tensor) and hasattr(owner, "local"):
        arguments = (owner.local,)
    between_neighbours = counted and name in _BETWEEN_NEIGHBOURS
    if between_neighbours:
        arguments, options = tuple(a for a in _flat(arguments) if isinstance(a, torch.Tensor)), {}
    words = []
    for value in _flat((*arguments, *options.values())):
        if isinstance(value, torch.Tensor):
            shape = [str(size) for size in value.shape]
            free = _FREE.get(name) if counted else None
            if between_neighbours:
                shape = ["…"]
            elif free is not None and free < len(shape):
                shape[free] = "…"
            words.append(f"{str(value.dtype).removeprefix('torch.')} {'×'.join(shape)}")
        elif value is None or isinstance(value, (int, float, str, tuple, list)):
            words.append(str(list(value) if isinstance(value, tuple) else value))
    return ", ".join(words)


def _flat(values: Iterable[object]) -> Iterator[object]:
    """Lists of tensors as tensors."""
    for value in values:
        if isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
            yield from value
        else:
            yield value


def caller() -> str:
    """File and line of the innermost call from outside this folder and torch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_CALLERS):
        frame = frame.f_back
    return f"{'/'.join(Path(frame.f_code.co_filename).parts[-3:])}:{frame.f_lineno}"
