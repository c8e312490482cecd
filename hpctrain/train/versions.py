"""Weights of several versions at once, for schedules that update while microbatches are under way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.func import functional_call

from hpctrain.data_parallel import DataParallelStrategy
from hpctrain.layers import Tokens
from hpctrain.layers.parameter import accumulate
from hpctrain.models.staged_model import StagedModel
from hpctrain.pipeline.actions import Action
from hpctrain.train.stages import Stages

if TYPE_CHECKING:
    from hpctrain.train.batches import Microbatch


class Versions(Stages):
    """Each forward is bound to the version of the weights that the schedule names, and its backward differentiates by
    that version. The optimizer updates the model's own parameters, of which the newest version is a copy, since what
    microbatches under way have saved must not change.

    Source: Narayanan et al., "PipeDream" (SOSP 2019), §3.3, weight stashing.
    """

    def __init__(self, model: StagedModel, microbatches: Sequence[Microbatch], strategy: DataParallelStrategy):
        super().__init__(model, microbatches)
        self.strategy = strategy
        self.parameters = dict(model.named_parameters())
        self.versions = {0: self._copy()}

    def _copy(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone().requires_grad_(p.requires_grad) for name, p in self.parameters.items()}

    def compute(self, action: Action, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        return functional_call(self.model, self.versions[action.version], (x, tokens, action.stage))

    def reduce(self, action: Action) -> None:
        self.strategy.zero_grad()
        for name, parameter in self.parameters.items():
            if not parameter.requires_grad:
                continue
            for weights in self.versions.values():
                gradient, weights[name].grad = weights[name].grad, None
                accumulate(parameter, gradient)
        self.strategy.finish_grad_sync()

    def update(self, action: Action) -> None:
        self.strategy.step(0.0, 0.0)
        self.versions[action.version] = self._copy()

    def free(self, action: Action) -> None:
        del self.versions[action.version]
