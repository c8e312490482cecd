"""Nodes that compute: any torch module, with or without weights, and the loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.func import functional_call

from hpctrain.pipeline.ampnet.node import BACKWARD, FORWARD, Emission, Message, Node, Run, State, remember
from hpctrain.pipeline.ampnet.weights import Weights
from hpctrain.pipeline.given_gradients import scalar_of


class Transform(Node):
    """Calls a module with the payloads of one state, one from each in port, and sends what it returns: one tensor, or
    one for each out port.

    Args:
        make: makes the module; called on the rank that owns the node.
        inputs, outputs: ports.
        given: function (state, instance) -> one more argument of the module.

    Attributes: `module` and `weights`, on the rank that owns the node, once the network is made.
    """

    def __init__(
        self, make: Callable[[], torch.nn.Module], inputs: int = 1, outputs: int = 1,
        given: Callable[[State, Any], Any] | None = None,
    ):  # fmt: skip
        self.make, self.inputs, self.outputs, self.given = make, inputs, outputs, given
        self.module: torch.nn.Module | None = None
        self.weights: Weights | None = None
        self.differentiated = [True] * inputs  # by the input of each port; not by what the source sends
        self._arrived: dict[State, dict[int, torch.Tensor]] = {}
        self._saved: dict[State, tuple] = {}  # inputs, outputs and version, from a forward to its backward
        self._gradients: dict[State, dict[int, torch.Tensor | None]] = {}

    def forward(self, port: int, message: Message, run: Run):
        state = message.state
        arrived = self._arrived.setdefault(state, {})
        remember(arrived, port, message.payload)
        if len(arrived) < self.inputs:
            return []
        del self._arrived[state]
        inputs = [self._leaf(arrived[i], i, run.training) for i in range(self.inputs)]
        return self._emit(state, *self._compute(state, inputs, run))

    def _leaf(self, payload, port, training):
        wanted = training and self.differentiated[port] and payload.is_floating_point()
        return payload.detach().requires_grad_() if wanted else payload

    def _compute(self, state, inputs, run) -> tuple[list[torch.Tensor], tuple]:
        """Outputs, and what the backward needs of it."""
        assert self.module is not None
        assert self.weights is not None  # this rank owns the node
        arguments = [*inputs, self.given(state, run.instances[state[0]])] if self.given else inputs
        if not run.training:
            with torch.no_grad():
                return self._outputs(functional_call(self.module, self.weights.newest, tuple(arguments))), ()
        version, weights = self.weights.take(state[0])
        outputs = self._outputs(functional_call(self.module, weights, tuple(arguments)))
        return outputs, (inputs, outputs, version, [w for w in weights.values() if w.requires_grad])

    def _outputs(self, given) -> list[torch.Tensor]:
        outputs = [given] if isinstance(given, torch.Tensor) else list(given)
        if len(outputs) != self.outputs:
            raise ValueError(f"{type(self.module).__name__} gave {len(outputs)} tensors for {self.outputs} ports")
        return outputs

    def _emit(self, state, outputs, saved):
        remember(self._saved, state, saved)
        return [Emission(FORWARD, port, Message(state, y.detach())) for port, y in enumerate(outputs)]

    def backward(self, port: int, message: Message, run: Run):
        state = message.state
        gradients = self._gradients.setdefault(state, {})
        gradients[port] = message.payload
        if len(gradients) < self.outputs:
            return []
        del self._gradients[state]
        saved = self._saved.pop(state)
        given = self._differentiate(state, saved, [gradients[i] for i in range(self.outputs)]) if saved else ()
        given = given or [None] * self.inputs
        return [Emission(BACKWARD, port, Message(state, gradient)) for port, gradient in enumerate(given)]

    def _differentiate(self, state, saved, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The gradients by the inputs; those by the weights go to `weights`."""
        inputs, outputs, version, weights = saved
        leaves = [x for x in inputs if x.requires_grad]
        pairs = [(y, gradient) for y, gradient in zip(outputs, gradients) if y.requires_grad and gradient is not None]
        found: Sequence = [None] * (len(leaves) + len(weights))
        if pairs and found:
            ends, given = zip(*pairs)
            found = torch.autograd.grad(scalar_of(ends, given), [*leaves, *weights], allow_unused=True)
        assert self.weights is not None
        self.weights.give(state, version, list(found[len(leaves) :]))
        by_leaf = iter(found)
        return [next(by_leaf) if x.requires_grad else None for x in inputs]

    def waiting(self):
        return len(self._arrived) + len(self._saved) + len(self._gradients)


class Loss(Transform):
    """The module returns the loss of what has come, a scalar, from which the way back begins. An instance may have any
    number of losses; the sum of all is its own.

    Args: as of `Transform`, without out ports; the target, by default `instance[1]`, is the module's last argument.

    Attributes: `losses`, those of the run so far, as ((state, …), loss).
    """

    def __init__(
        self, make: Callable[[], torch.nn.Module], inputs: int = 1,
        given: Callable[[State, Any], Any] | None = lambda state, instance: instance[1],
    ):  # fmt: skip
        super().__init__(make, inputs, 0, given)
        self.losses: list[tuple[State, torch.Tensor]] = []

    def _outputs(self, given):
        if not isinstance(given, torch.Tensor) or given.dim():
            raise ValueError(f"{type(self.module).__name__} must give a loss, a tensor without dims, got {given!r:.99}")
        return [given]

    def _emit(self, state, outputs, saved):
        self.losses.append((state, outputs[0].detach()))
        given = self._differentiate(state, saved, [torch.ones_like(outputs[0])]) if saved else [None] * self.inputs
        return [Emission(BACKWARD, port, Message(state, gradient)) for port, gradient in enumerate(given)]


def concat(inputs: int = 2, dim: int = -1) -> Transform:
    """Joins the payloads of one state along a dim."""
    return Transform(lambda: _Call(lambda *tensors: torch.cat(tensors, dim)), inputs)


def split(sizes: Sequence[int], dim: int = -1) -> Transform:
    """Cuts a payload along a dim, a part for each out port."""
    return Transform(lambda: _Call(lambda x: [part.contiguous() for part in x.split(list(sizes), dim)]), 1, len(sizes))


class _Call(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.forward = function
