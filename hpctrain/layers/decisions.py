"""What layers decide once, though they compute twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Decisions:
    """A record of what a function decided in its first run, for the runs after it, which ask in the same order.

    >>> decisions, number = Decisions(), iter(range(9))
    >>> def run():
    ...     decisions.rewind()
    ...     return [decisions.decide(lambda: next(number)) for _ in range(2)]
    >>> run(), run()
    ([(0, True), (1, True)], [(0, False), (1, False)])
    """

    def __init__(self):
        self._record: list = []
        self._place = 0

    def rewind(self) -> None:
        """A run begins."""
        self._place = 0

    def decide(self, choice: Callable) -> tuple[Any, bool]:
        """What was chosen at this place of an earlier run, or else `choice()`; and whether it is the first run."""
        first = self._place == len(self._record)
        if first:
            self._record.append(choice())
        self._place += 1
        return self._record[self._place - 1], first
