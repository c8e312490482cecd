"""Where instances enter: the one node that sends without having received."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hpctrain.pipeline.ampnet.node import FORWARD, Emission, Message, Node, Run


class Source(Node):
    """Sends the messages of an instance, and knows that the instance is done when all of them have come back.

    Args:
        messages: function instance -> the messages as (out port, payload, numbers); their states are the number of the
            instance and these numbers. By default one, `instance[0]`.
        outputs: ports.
    """

    inputs = 0

    def __init__(
        self,
        messages: Callable[[Any], Sequence[tuple[int, torch.Tensor, Sequence[int]]]] = lambda instance: [
            (0, instance[0], ())
        ],
        outputs: int = 1,
    ):
        self.messages, self.outputs = messages, outputs
        self._away: dict[int, int] = {}

    def admit(self, instance: int, given: Any) -> list[Emission]:
        """Its messages; the instance is under way from now on."""
        emissions = []
        for port, payload, numbers in self.messages(given):
            state = (instance, *map(int, numbers))
            emissions.append(Emission(FORWARD, port, Message(state, payload)))
        if emissions:
            self._away[instance] = len(emissions)
        return emissions

    @property
    def active(self) -> int:
        """Instances under way."""
        return len(self._away)

    def backward(self, port: int, message: Message, run: Run):
        instance = message.state[0]
        self._away[instance] -= 1
        if not self._away[instance]:
            del self._away[instance]
        return []

    def waiting(self):
        return len(self._away)
