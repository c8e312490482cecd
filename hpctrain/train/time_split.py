"""Where the time of a training step goes."""

from __future__ import annotations

from hpctrain.traffic import Traffic

AXES = ("data", "pipeline", "tensor")


def time_split(traffic: Traffic, total: float, reading: float) -> dict[str, float]:
    """Seconds of this rank by part: "reading" the samples; communication of "data", "pipeline" and "tensor"; "bubble",
    the waiting of a pipeline stage for its neighbours; "agreeing", of all ranks on how to go on; and "compute", which
    is the rest.

    >>> ledger = Traffic()
    >>> ledger.add_seconds("pipeline", "recv wait", 2.0)
    >>> ledger.add_seconds("x+y", "gather", 1.0)
    >>> ledger.add_seconds("world", "all_reduce", 0.5)
    >>> time_split(ledger, 10.0, 0.5)
    {'compute': 6.0, 'reading': 0.5, 'data': 0.0, 'pipeline': 0.0, 'tensor': 1.0, 'bubble': 2.0, 'agreeing': 0.5}
    """
    parts = dict.fromkeys((*AXES, "bubble", "agreeing"), 0.0)
    for (axis, operation), seconds in traffic.seconds().items():
        if axis == "pipeline" and operation.startswith("recv"):
            axis = "bubble"
        elif axis == "world":
            axis = "agreeing"
        parts[axis if axis in parts else "tensor"] += seconds
    return {"compute": max(0.0, total - reading - sum(parts.values())), "reading": reading, **parts}
