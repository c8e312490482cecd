"""Where the time of a training step goes, and its bytes."""

from __future__ import annotations

from hpctrain.traffic import Traffic

AXES = ("data", "sequence", "expert", "pipeline", "tensor")
PART = {"replica": "data", "copies": "data", "ring": "sequence", "ulysses": "sequence"}  # of which they are


def time_split(traffic: Traffic, total: float, reading: float) -> dict[str, float]:
    """Seconds of this rank by part: "reading" the samples; communication of "data", "sequence" (the ring, Ulysses),
    "expert", "pipeline" and "tensor"; "bubble", the waiting of a pipeline stage for its neighbours; "agreeing", of all
    ranks on how to go on; and "compute", which is the rest.

    >>> ledger = Traffic()
    >>> ledger.add_seconds("pipeline", "recv wait", 2.0)
    >>> ledger.add_seconds("x+y", "gather", 1.0)
    >>> ledger.add_seconds("world", "all_reduce", 0.5)
    >>> time_split(ledger, 10.0, 0.5)
    {'compute': 6.0, 'reading': 0.5, 'data': 0.0, 'sequence': 0.0, 'expert': 0.0, 'pipeline': 0.0, 'tensor': 1.0,
     'bubble': 2.0, 'agreeing': 0.5}
    """
    parts = dict.fromkeys((*AXES, "bubble", "agreeing"), 0.0)
    for (axis, operation), seconds in traffic.seconds().items():
        if axis == "pipeline" and operation.startswith("recv"):
            axis = "bubble"
        elif axis == "world":
            axis = "agreeing"
        axis = PART.get(axis, axis)
        parts[axis if axis in parts else "tensor"] += seconds
    return {"compute": max(0.0, total - reading - sum(parts.values())), "reading": reading, **parts}


def bytes_by_axis(traffic: Traffic, direction: str) -> dict[str, int]:
    """What this rank has "sent" or "received", by axis of the grid.

    >>> ledger = Traffic()
    >>> ledger.add("x+y", "all_gather", sent=8)
    >>> ledger.add("world", "all_reduce", sent=4)
    >>> bytes_by_axis(ledger, "sent")
    {'data': 0, 'sequence': 0, 'expert': 0, 'pipeline': 0, 'tensor': 8}
    """
    table = dict.fromkeys(AXES, 0)
    for (axis, _), cell in traffic.table().items():
        if axis != "world":  # what the ranks agree on is no tensor of the training
            axis = PART.get(axis, axis)
            table[axis if axis in table else "tensor"] += cell[direction]
    return table
