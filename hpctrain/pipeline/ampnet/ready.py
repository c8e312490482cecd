"""The messages that wait on one rank, and which of them is next."""

from __future__ import annotations

import heapq
import json
from pathlib import Path
from typing import NamedTuple

from hpctrain.pipeline.ampnet.node import BACKWARD, Message, State


class Item(NamedTuple):
    """A message at the node that it goes to; `edge` is the number of its connection."""

    edge: int
    direction: int
    message: Message

    @property
    def name(self) -> tuple[int, int, State]:
        """Tells it from all others of a run."""
        return self.edge, self.direction, self.message.state


class Ready:
    """Gradients before activations, which frees memory and keeps weights fresh; of each the oldest instance first, so
    that what was begun ends; of one instance, in the order in which they came."""

    def __init__(self):
        self._heap: list[tuple] = []
        self._count = 0

    def __len__(self):
        return len(self._heap)

    def push(self, item: Item) -> None:
        self._count += 1
        key = item.direction != BACKWARD, item.message.state[0], self._count
        heapq.heappush(self._heap, (*key, item))

    def pop(self) -> Item | None:
        """The next one; None where none is to be had yet."""
        return heapq.heappop(self._heap)[-1] if self._heap else None


class Replay:
    """The messages in the order of a recorded run: the next one is waited for, whatever else has come."""

    def __init__(self, order: list[tuple[int, int, State]]):
        self._order = iter(order)
        self._next = next(self._order, None)
        self._items: dict[tuple, Item] = {}

    def __len__(self):
        return len(self._items)

    def push(self, item: Item) -> None:
        self._items[item.name] = item

    def pop(self) -> Item | None:
        item = None if self._next is None else self._items.pop(self._next, None)
        if item is not None:
            self._next = next(self._order, None)
        return item


class Record:
    """The order in which this rank worked on its messages, run after run.

    Attributes: `runs`, of each the names of the messages.
    """

    def __init__(self, runs: list[list[tuple[int, int, State]]] | None = None):
        self.runs = runs or []

    def save(self, path: str | Path) -> None:
        """Write it as JSON; each rank has a file of its own."""
        Path(path).write_text(json.dumps(self.runs))

    @classmethod
    def load(cls, path: str | Path) -> Record:
        return cls.of(json.loads(Path(path).read_text()))

    @classmethod
    def of(cls, runs: list) -> Record:
        """From JSON, whose states are lists."""
        return cls([[(edge, direction, tuple(state)) for edge, direction, state in run] for run in runs])
