"""Traffic: the one ledger of bytes that leave and reach this rank, and of the seconds it takes."""


class Traffic:
    """Bytes sent and received by this rank, for each (axis, operation).

    `comm/` adds one entry a call. A collective counts what its bandwidth-optimal algorithm moves: an all-gather
    receives every other rank's part once, an all-reduce sends and receives 2 (p-1)/p of its tensor.

    >>> ledger = Traffic()
    >>> ledger.add("x", "all_gather", sent=30, received=20)
    >>> ledger.add("x", "send", sent=5)
    >>> ledger.total("sent"), ledger.total("sent", axes=("x",)), ledger.total("received", axes=("data",))
    (35, 35, 0)
    """

    def __init__(self):
        self._cells: dict[tuple[str, str], list[int]] = {}
        self._seconds: dict[tuple[str, str], float] = {}
        self.timing = False  # an operation is being timed; those that it is made of are not

    def add(self, axis: str, operation: str, sent: int = 0, received: int = 0) -> None:
        cell = self._cells.get((axis, operation))
        if cell is None:
            cell = self._cells[axis, operation] = [0, 0, 0]
        cell[0] += 1
        cell[1] += sent
        cell[2] += received

    def add_seconds(self, axis: str, operation: str, seconds: float) -> None:
        self._seconds[axis, operation] = self._seconds.get((axis, operation), 0.0) + seconds

    def seconds(self) -> dict[tuple[str, str], float]:
        """{(axis, operation): seconds}; "NAME wait" is the waiting for an operation that was started."""
        return dict(self._seconds)

    def table(self) -> dict[tuple[str, str], dict[str, int]]:
        """{(axis, operation): {"calls", "sent", "received"}}, bytes."""
        return {key: dict(zip(("calls", "sent", "received"), cell)) for key, cell in self._cells.items()}

    def total(self, what: str, axes: tuple[str, ...] | None = None) -> int:
        """Sum of "calls", "sent" or "received" over the named axes, or over all of them."""
        return sum(cell[what] for (axis, _), cell in self.table().items() if axes is None or axis in axes)

    def clear(self) -> None:
        self._cells.clear()
        self._seconds.clear()
