"""What ranks tell each other beside tensors."""

from __future__ import annotations

import contextlib
from typing import Any

from hpctrain.grid import Axis


def all_gather_object(value: Any, axis: Axis, patience: int = 1) -> list:
    """`value`, any Python object, of every rank of the axis, in rank order, on every rank. The grid's watchdog waits
    `patience` times as long as for an operation on tensors."""
    watchdog = axis.transport.watchdog
    with watchdog.during(axis, "all_gather_object", patience) if watchdog else contextlib.nullcontext():
        return axis.comm.allgather(value)
