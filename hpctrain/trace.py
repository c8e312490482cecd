"""What a rank does and when, noted while it is being traced: steps, pipeline actions and operations on tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from time import perf_counter
from typing import NamedTuple


class Span(NamedTuple):
    """Attributes: `track`, the row of the rank's time line; `start` and `stop`, seconds of `time.perf_counter`;
    `about`, numbers and words that explain it."""

    track: str
    name: str
    start: float
    stop: float
    about: dict[str, int | str]


class Trace:
    """The spans of this rank, in the order of their ends. Those of one track follow each other."""

    def __init__(self):
        self.spans: list[Span] = []

    def add(self, track: str, name: str, start: float, **about: int | str) -> None:
        """One that ends now."""
        self.spans.append(Span(track, name, start, perf_counter(), about))

    def add_operation(
        self, name: str, peer: int | None, start: float, before: tuple[int, int], after: tuple[int, int]
    ) -> None:
        """One over MPI that ends now; the ledger had these bytes sent and received `before` and `after` it."""
        moved = {"sent": after[0] - before[0], "received": after[1] - before[1]}
        self.add("MPI", name, start, **moved, **({} if peer is None else {"peer": peer}))


@contextlib.contextmanager
def span(trace: Trace | None, track: str, name: str, **about: int | str) -> Iterator[None]:
    """Around what is noted, where there is a trace.

    >>> trace = Trace()
    >>> with span(trace, "pipeline", "forward 0", stage=1), span(None, "pipeline", "nothing"):
    ...     pass
    >>> [(each.track, each.name, each.about, each.start <= each.stop) for each in trace.spans]
    [('pipeline', 'forward 0', {'stage': 1}, True)]
    """
    start = perf_counter()
    yield
    if trace is not None:
        trace.add(track, name, start, **about)
