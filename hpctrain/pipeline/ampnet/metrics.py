"""How a rank spends its time in a message driven pipeline, and how long its queues are."""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict


class Metrics:
    """Of the runs since the last `clear`.

    Attributes:
        seconds: of all runs; idle: of waiting for messages.
        work: seconds by node; messages: worked on, by node.
        longest: most messages that waited for a node at once.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.seconds = self.idle_seconds = 0.0
        self.work: defaultdict[str, float] = defaultdict(float)
        self.messages: Counter[str] = Counter()
        self.longest: Counter[str] = Counter()
        self._queued: Counter[str] = Counter()

    @contextlib.contextmanager
    def run(self):
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start

    @contextlib.contextmanager
    def idle(self):
        """Around waiting."""
        start = time.perf_counter()
        yield
        self.idle_seconds += time.perf_counter() - start

    @contextlib.contextmanager
    def busy(self, node: str):
        """Around the work on one of a node's messages."""
        self._queued[node] -= 1
        start = time.perf_counter()
        yield
        self.work[node] += time.perf_counter() - start
        self.messages[node] += 1

    def arrived(self, node: str) -> None:
        """A message waits for the node."""
        self._queued[node] += 1
        self.longest[node] = max(self.longest[node], self._queued[node])

    @property
    def occupancy(self) -> float:
        """The part of the time in which the rank did not wait, 0 to 1."""
        return 1 - self.idle_seconds / self.seconds if self.seconds else 0.0
