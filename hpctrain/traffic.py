"""Traffic: the one ledger of bytes that leave and reach this rank, and of the seconds it takes."""


class OperationTraffic:
    """Calls of one operation along one axis, the bytes they sent and received, and their seconds, on this rank."""

    __slots__ = ("calls", "received", "seconds", "sent")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.calls = self.sent = self.received = 0
        self.seconds = 0.0


class Traffic:
    """Bytes sent and received by this rank, for each (axis, operation).

    `comm/` adds one entry a call. What goes by messages of `comm/` itself is counted as it is sent: point to point,
    exchanges, halos, and the all-reduce algorithms naive, ring, direct and rabenseifner. For what MPI does inside of a
    collective of its own, and for shared memory, the entry is a formula that depends on no algorithm, what a
    bandwidth-optimal one moves: an all-gather receives every other rank's part once, an all-reduce sends and receives
    2 (p-1)/p of its tensor. The total over all ranks is then what is sent for common algorithms, but not each rank's:
    of an all-reduce on 3 ranks by Open MPI rank 0 sends 1.5 tensors, the others 0.75, where the formula says 1.33.

    >>> ledger = Traffic()
    >>> ledger.add("x", "all_gather", sent=30, received=20)
    >>> ledger.add("x", "send", sent=5)
    >>> ledger.total("sent"), ledger.total("sent", axes=("x",)), ledger.total("received", axes=("data",))
    (35, 35, 0)
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], OperationTraffic] = {}
        self.timing = False  # an operation is being timed; those that it is made of are not

    def entry(self, axis: str, operation: str) -> OperationTraffic:
        """The entry to add to, always the same one: who calls often keeps it."""
        entry = self._entries.get((axis, operation))
        if entry is None:
            entry = self._entries[axis, operation] = OperationTraffic()
        return entry

    def add(self, axis: str, operation: str, sent: int = 0, received: int = 0) -> None:
        entry = self.entry(axis, operation)
        entry.calls += 1
        entry.sent += sent
        entry.received += received

    def add_seconds(self, axis: str, operation: str, seconds: float) -> None:
        self.entry(axis, operation).seconds += seconds

    def seconds(self) -> dict[tuple[str, str], float]:
        """{(axis, operation): seconds}; "NAME wait" is the waiting for an operation that was started."""
        return {key: entry.seconds for key, entry in self._entries.items() if entry.seconds}

    def table(self) -> dict[tuple[str, str], dict[str, int]]:
        """{(axis, operation): {"calls", "sent", "received"}}, bytes."""
        return {
            key: {"calls": entry.calls, "sent": entry.sent, "received": entry.received}
            for key, entry in self._entries.items()
            if entry.calls
        }

    def total(self, what: str, axes: tuple[str, ...] | None = None) -> int:
        """Sum of "calls", "sent" or "received" over the named axes, or over all of them."""
        return sum(cell[what] for (axis, _), cell in self.table().items() if axes is None or axis in axes)

    def moved(self) -> tuple[int, int]:
        """Bytes sent and received so far, by all operations."""
        entries = self._entries.values()
        return sum(entry.sent for entry in entries), sum(entry.received for entry in entries)

    def clear(self) -> None:
        for entry in self._entries.values():
            entry.clear()
