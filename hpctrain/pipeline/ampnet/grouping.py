"""One message for several, and several for one: broadcast, group and ungroup. Rows are dim 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hpctrain.pipeline.ampnet.node import BACKWARD, FORWARD, Emission, Message, Node, Run, State, remember


class Broadcast(Node):
    """The same message by every out port; the gradient is the sum, in the reverse order of the ports, as autograd adds
    those of later users first."""

    def __init__(self, outputs: int = 2):
        self.outputs = outputs
        self._gradients: dict[State, dict[int, torch.Tensor | None]] = {}

    def forward(self, port: int, message: Message, run: Run):
        remember(self._gradients, message.state, {})
        return [Emission(FORWARD, out, message) for out in range(self.outputs)]

    def backward(self, port: int, message: Message, run: Run):
        found = self._gradients[message.state]
        found[port] = message.payload
        if len(found) < self.outputs:
            return []
        del self._gradients[message.state]
        given = [found[out] for out in reversed(range(self.outputs)) if found[out] is not None]
        return [Emission(BACKWARD, 0, Message(message.state, _sum(given)))]

    def waiting(self):
        return len(self._gradients)


def _sum(tensors):
    total = tensors[0] if tensors else None
    for tensor in tensors[1:]:
        total = total + tensor
    return total


class Group(Node):
    """Joins the messages of one group to one, their rows in the order of their places.

    Args:
        group: function (state, instance) -> (state of the group, place of this message, number of messages).
    """

    def __init__(self, group: Callable[[State, Any], tuple[State, int, int]]):
        self.group = group
        self._members: dict[State, dict[int, Message]] = {}
        self._sizes: dict[State, list[tuple[State, int]]] = {}

    def forward(self, port: int, message: Message, run: Run):
        state, place, count = self.group(message.state, run.instances[message.state[0]])
        members = self._members.setdefault(state, {})
        remember(members, place, message)
        if len(members) < count:
            return []
        messages = [member for _, member in sorted(self._members.pop(state).items())]
        remember(self._sizes, state, [(member.state, len(member.tensor)) for member in messages])
        return [Emission(FORWARD, 0, Message(state, torch.cat([member.tensor for member in messages])))]

    def backward(self, port: int, message: Message, run: Run):
        members = self._sizes.pop(message.state)
        parts: Sequence[torch.Tensor | None] = [None] * len(members)
        if message.payload is not None:
            parts = message.payload.split([rows for _, rows in members])
        return [Emission(BACKWARD, 0, Message(state, part)) for (state, _), part in zip(members, parts)]

    def waiting(self):
        return len(self._members) + len(self._sizes)


class Ungroup(Node):
    """Cuts a message's rows into messages of their own.

    Args:
        ungroup: function (state, instance) -> the parts as (state, rows).
    """

    def __init__(self, ungroup: Callable[[State, Any], Sequence[tuple[State, int]]]):
        self.ungroup = ungroup
        self._parts: dict[State, tuple[list[torch.Tensor], dict[int, torch.Tensor | None]]] = {}  # by the whole's state
        self._whole: dict[State, tuple[State, int]] = {}

    def forward(self, port: int, message: Message, run: Run):
        states = self.ungroup(message.state, run.instances[message.state[0]])
        rows = [count for _, count in states]
        if not states or sum(rows) != len(message.tensor):
            raise ValueError(f"ungroup gave parts of {rows} rows for {len(message.tensor)} of state {message.state}")
        parts = message.tensor.split(rows)
        remember(self._parts, message.state, (parts, {}))
        for place, (state, _) in enumerate(states):
            remember(self._whole, state, (message.state, place))
        return [Emission(FORWARD, 0, Message(state, part)) for (state, _), part in zip(states, parts)]

    def backward(self, port: int, message: Message, run: Run):
        state, place = self._whole.pop(message.state)
        parts, found = self._parts[state]
        found[place] = message.payload
        if len(found) < len(parts):
            return []
        del self._parts[state]
        if all(gradient is None for gradient in found.values()):
            return [Emission(BACKWARD, 0, Message(state, None))]
        gradients = ((found[i], part) for i, part in enumerate(parts))
        whole = [torch.zeros_like(part) if gradient is None else gradient for gradient, part in gradients]
        return [Emission(BACKWARD, 0, Message(state, torch.cat(whole)))]

    def waiting(self):
        return len(self._parts) + len(self._whole)
