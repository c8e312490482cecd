"""The weights of one node: a version for every message under way, and updates that the node makes by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from hpctrain.pipeline.ampnet.node import State
from hpctrain.pipeline.message_driven import AMPNet

Gradients = list[torch.Tensor | None]


@dataclass
class _Instance:
    """What one instance has at the node: forwards without their backward yet, and gradients.

    Attributes: `sum` of those that may be added as they come; `by_state`, those that are kept apart; `versions`, that
    each of them is of.
    """

    missing: int = 0
    sum: Gradients | None = None
    by_state: dict[State, Gradients] = field(default_factory=dict)
    versions: list[int] = field(default_factory=list)


class Weights:
    """A forward computes with the newest weights, and its backward differentiates by the same ones, whatever was
    updated in between (the paper differentiates by the newest, which is the gradient of nothing). An update leaves
    older weights alone where a message still needs them, and is made in place where none does.

    Updates are made when an instance comes that was not here before, each by the gradients of the next so many of those
    that have nothing left here, as many as with one instance at a time; so never in the middle of one that is alone.
    `finish` makes the last, of what is left.

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
        self._here: dict[int, _Instance] = {}
        self._sum: Gradients = self._none()  # of instances that are done
        self._done = 0
        self._versions: list[int] = []  # that the gradients of those that are done are of
        self._last: Gradients = []

    def take(self, instance: int) -> tuple[int, dict[str, torch.Tensor]]:
        """The newest version and its number, for a forward whose backward calls `give`."""
        if instance not in self._here:
            self._collect()
            self._here[instance] = _Instance()
        self._here[instance].missing += 1
        self._users += 1
        return self.updates, self.newest

    @property
    def newest(self) -> dict[str, torch.Tensor]:
        """By name: tensors beside the parameters, so that autograd of what is under way sees no later update."""
        if self._newest is None:
            self._newest = {name: p.data.requires_grad_(p.requires_grad) for name, p in self.parameters.items()}
        return self._newest

    def give(self, state: State, version: int, gradients: Gradients) -> None:
        """Those of one message, whose forward took this version."""
        self._users -= version == self.updates
        here = self._here[state[0]]
        here.missing -= 1
        here.versions.append(version)
        if self.options.max_active_keys == 1:
            here.by_state[state] = gradients
        else:
            here.sum = _added(here.sum or self._none(), gradients)

    def finish(self) -> None:
        """Update by what is left."""
        self._collect()
        if self._done:
            self._update()

    def leave_gradient(self) -> None:
        """Put the gradient of the last update since the last call on the parameters, for whoever asks for its norm;
        none where there was no update. After `finish` of all the rank's nodes, since the optimizer's step for one of
        them would take the gradients of the others too."""
        for parameter, gradient in zip(self.trained, self._last):
            parameter.grad = gradient
        self._last = []

    def _none(self) -> Gradients:
        return [None] * len(self.trained)

    def _collect(self) -> None:
        """Add up the instances that have nothing left here, and update whenever they are enough."""
        for number in [number for number, here in self._here.items() if not here.missing]:
            here = self._here.pop(number)
            total = here.sum or self._none()
            for _, gradients in sorted(here.by_state.items(), reverse=True):
                total = _added(total, gradients)
            self._sum = _added(self._sum, total)
            self._done += 1
            self._versions += here.versions
            if self._done >= self.options.min_update_frequency:
                self._update()

    def _update(self) -> None:
        stale = [self.updates - version for version in self._versions]
        self.staleness.update(stale)
        if self.trained:  # a step of the optimizer without any would still count as one, and call its hooks
            self._step(sum(stale) / len(stale))
        self.updates += 1
        self._newest, self._users = None, 0
        self._sum, self._done, self._versions = self._none(), 0, []

    def _step(self, staleness: float) -> None:
        if self._users:  # a message under way keeps the memory of the version that it took
            for parameter in self.parameters.values():
                parameter.data = parameter.data.clone()
        self._last = [torch.zeros_like(p) if g is None else g for p, g in zip(self.trained, self._sum)]
        for parameter, gradient in zip(self.trained, self._last):
            parameter.grad = gradient
        rates = [group["lr"] for group in self.optimizer.param_groups]
        if self.options.staleness_correction:
            for group in self.optimizer.param_groups:
                group["lr"] = group["lr"] / max(1.0, staleness)
        self.optimizer.step()
        for group, rate in zip(self.optimizer.param_groups, rates):
            group["lr"] = rate
        for parameter in self.trained:  # so that the next node's step passes over them
            parameter.grad = None


def _added(a: Gradients, b: Gradients) -> Gradients:
    return [y if x is None else x if y is None else x + y for x, y in zip(a, b)]
