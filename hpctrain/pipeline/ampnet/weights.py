"""The weights of one node: a version for every message under way, and updates that the node makes by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch

from hpctrain.pipeline.ampnet.node import State
from hpctrain.pipeline.message_driven import AMPNet

Gradients = list[torch.Tensor | None]


class Weights:
    """A forward computes with the newest weights, and its backward differentiates by the same ones, whatever was
    updated in between (the paper differentiates by the newest, which is the gradient of nothing). An update leaves
    older weights alone where a message still needs them, and is made in place where none does.

    An update is made when an instance comes forward that has no gradient in the sum yet, so never in the middle of one
    instance that is alone; `finish` makes the last.

    Where one instance at a time is under way, its gradients are added in the reverse order of its states, whatever the
    order in which they came: then the sum is that of autograd on one rank, to the bit. Otherwise as they come.

    Args:
        parameters: by name; those that are not trained are only computed with.
        optimizer: of all the rank's parameters; it passes over those without gradient.

    Attributes:
        staleness: of the gradients so far, how many were of weights 0, 1, 2, … updates old when they were applied.
        updates: made so far.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer, options: AMPNet):
        self.parameters, self.optimizer, self.options = dict(parameters), optimizer, options
        self.trained = [p for p in self.parameters.values() if p.requires_grad]
        self.staleness: Counter[int] = Counter()
        self.updates = 0
        self._users = 0  # messages that need the newest version
        self._newest: dict[str, torch.Tensor] | None = None
        self._sum: Gradients = [None] * len(self.trained)
        self._versions: list[int] = []  # of the gradients in the sum
        self._instances: set[int] = set()  # of which the sum has gradients
        self._alone: dict[State, Gradients] = {}  # of the one instance under way
        self._last: Gradients = []

    def begin(self, instance: int) -> None:
        """A message of an instance comes forward."""
        if instance in self._instances:
            return
        self._add_up()
        if len(self._instances) >= self.options.min_update_frequency:
            self._update()

    def take(self) -> tuple[int, dict[str, torch.Tensor]]:
        """The newest version and its number, for a forward whose backward calls `give`."""
        self._users += 1
        return self.updates, self.newest

    @property
    def newest(self) -> dict[str, torch.Tensor]:
        """By name: tensors beside the parameters, so that autograd of what is under way is told of no later update."""
        if self._newest is None:
            self._newest = {name: p.data.requires_grad_(p.requires_grad) for name, p in self.parameters.items()}
        return self._newest

    def give(self, state: State, version: int, gradients: Gradients) -> None:
        """Those of one message, whose forward took this version."""
        self._users -= version == self.updates
        self._instances.add(state[0])
        self._versions.append(version)
        if self.options.max_active_keys == 1:
            self._alone[state] = gradients
        else:
            self._sum = _added(self._sum, gradients)

    def finish(self) -> None:
        """Update by what is left; leaves the last gradient on the parameters, for whoever asks for its norm."""
        self._add_up()
        if self._instances:
            self._update()
        for parameter, gradient in zip(self.trained, self._last):
            parameter.grad = gradient

    def _add_up(self) -> None:
        total: Gradients = [None] * len(self.trained)
        for _, gradients in sorted(self._alone.items(), reverse=True):
            total = _added(total, gradients)
        self._sum, self._alone = _added(self._sum, total), {}

    def _update(self) -> None:
        stale = [self.updates - version for version in self._versions]
        self.staleness.update(stale)
        if self._users:  # a message under way keeps the memory of the version that it took
            for parameter in self.parameters.values():
                parameter.data = parameter.data.clone()
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        self._last = [torch.zeros_like(p) if g is None else g for p, g in zip(self.trained, self._sum)]
        for parameter, gradient in zip(self.trained, self._last):
            parameter.grad = gradient
        self._step(sum(stale) / len(stale))
        self.updates += 1
        self._newest, self._users = None, 0
        self._sum, self._versions, self._instances = [None] * len(self.trained), [], set()

    def _step(self, staleness: float) -> None:
        rates = [group["lr"] for group in self.optimizer.param_groups]
        if self.options.staleness_correction:
            for group in self.optimizer.param_groups:
                group["lr"] = group["lr"] / max(1.0, staleness)
        self.optimizer.step()
        for group, rate in zip(self.optimizer.param_groups, rates):
            group["lr"] = rate


def _added(a: Gradients, b: Gradients) -> Gradients:
    return [y if x is None else x if y is None else x + y for x, y in zip(a, b)]
