"""Data-dependent control flow: nodes that look at a message's state and leave its payload alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpctrain.pipeline.ampnet.node import BACKWARD, FORWARD, Emission, Message, Node, Run, State, remember


class Condition(Node):
    """Sends a message by one of several out ports: `choose(state, instance)`."""

    def __init__(self, choose: Callable[[State, Any], int], outputs: int = 2):
        self.choose, self.outputs = choose, outputs

    def forward(self, port: int, message: Message, run: Run):
        out = int(self.choose(message.state, run.instances[message.state[0]]))
        if not 0 <= out < self.outputs:
            raise ValueError(f"choose gave port {out} for state {message.state}; there are {self.outputs}")
        return [Emission(FORWARD, out, message)]

    def backward(self, port: int, message: Message, run: Run):
        return [Emission(BACKWARD, 0, message)]


class Join(Node):
    """The paper's Φ: gives on what comes by any in port, and sends its gradient back there."""

    def __init__(self, inputs: int = 2):
        self.inputs = inputs
        self._origin: dict[State, int] = {}

    def forward(self, port: int, message: Message, run: Run):
        remember(self._origin, message.state, port)
        return [Emission(FORWARD, 0, message)]

    def backward(self, port: int, message: Message, run: Run):
        return [Emission(BACKWARD, self._origin.pop(message.state), message)]

    def waiting(self):
        return len(self._origin)


class Restate(Node):
    """Changes the state, `change(state, instance)`, as the counter of a loop does; no two states to the same."""

    def __init__(self, change: Callable[[State, Any], State]):
        self.change = change
        self._before: dict[State, State] = {}

    def forward(self, port: int, message: Message, run: Run):
        state = tuple(map(int, self.change(message.state, run.instances[message.state[0]])))
        if state[:1] != message.state[:1]:
            raise ValueError(f"change gave {state} for state {message.state}, which is of another instance")
        remember(self._before, state, message.state)
        return [Emission(FORWARD, 0, Message(state, message.payload))]

    def backward(self, port: int, message: Message, run: Run):
        return [Emission(BACKWARD, 0, Message(self._before.pop(message.state), message.payload))]

    def waiting(self):
        return len(self._before)


def loop_counter(place: int = 1) -> Restate:
    """Adds 1 to a number of the state, by default to that after the instance's."""
    return Restate(lambda state, instance: (*state[:place], state[place] + 1, *state[place + 1 :]))
