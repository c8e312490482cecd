"""Messages, and what every node does with them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch

FORWARD, BACKWARD = 0, 1

State = tuple[int, ...]  # the number of the instance, then whatever tells its messages apart


class Message(NamedTuple):
    """A tensor and the state that says what it is of. The message that goes back for it has the same state, and its
    gradient as payload, or None where there is none (ids; evaluation)."""

    state: State
    payload: torch.Tensor | None

    @property
    def tensor(self) -> torch.Tensor:
        """The payload of a message that goes forward."""
        assert self.payload is not None
        return self.payload


class Emission(NamedTuple):
    """A message that leaves a node: forward by an out port, or backward by an in port."""

    direction: int
    port: int
    message: Message


class Run(NamedTuple):
    """What nodes know of the run: its instances, by number, and whether gradients are wanted."""

    instances: Sequence[Any]
    training: bool


class Node:
    """One node of a static graph. For each message that came forward by an in port one goes backward by the same port,
    with the same state: so whoever sent a message learns that all that followed from it is done.

    Attributes: `inputs`, `outputs`: its ports, numbered from 0.
    """

    inputs = outputs = 1

    def forward(self, port: int, message: Message, run: Run) -> list[Emission]:
        raise NotImplementedError

    def backward(self, port: int, message: Message, run: Run) -> list[Emission]:
        raise NotImplementedError

    def waiting(self) -> int:
        """Messages whose way back is not done, or that wait for others; 0 at quiet points."""
        return 0


def remember(cache: dict, state: Hashable, value: Any) -> None:
    """Put under a state that must not be there yet."""
    if state in cache:
        raise ValueError(f"two messages of state {state} are at one node; give each a state of its own")
    cache[state] = value
