"""Training steps of a model that is cut into pipeline stages."""

from __future__ import annotations

import torch

from hpctrain import comm
from hpctrain.pipeline import Executor, forward_only, one_f_one_b
from hpctrain.train import step


class Trainer(step.Trainer):
    """Trains a model on any grid.

    Args:
        model: this rank's pipeline stage, such as `models.gpt2.GPT2`.
        grid: the process grid.
        optimizer: any torch optimizer over the model's parameters.
        microbatches: of a step, on each replica.
        max_norm: largest norm of the gradient; 0 for no clipping.
        replicas: one of `ht.replicas` over the same parameters and optimizer; by default `DataParallel`.
    """

    def __init__(
        self, model, grid, optimizer: torch.optim.Optimizer, microbatches: int = 1, max_norm: float = 0.0, replicas=None
    ):
        super().__init__(model, grid, optimizer, max_norm, replicas)
        stages = grid.pipeline.size
        self._train = Executor(grid.pipeline, one_f_one_b(stages, microbatches))
        self._evaluate = Executor(grid.pipeline, forward_only(stages, microbatches))

    def _check(self, grid):
        """Any number of stages will do."""

    def step(self, microbatches: list) -> tuple[float, float]:
        """Train on this rank's microbatches; returns the loss before the update and the norm of its gradient.

        Raises:
            FloatingPointError: on every rank, when either is not finite; nothing is updated.
        """
        self.model.train()
        self.replicas.clear()
        losses = self._train.run(_Stage(self.model, microbatches), on_last_backward=self.replicas.overlap)
        return self._update(losses)

    def evaluate(self, batches: list[list]) -> float:
        """The loss over all of `batches`, each a list of this rank's microbatches."""
        self.model.eval()
        losses = []
        with torch.no_grad(), self.replicas.whole():
            for microbatches in batches:
                losses += self._evaluate.run(_Stage(self.model, microbatches))
        return comm.all_reduce(self._share(losses), self.grid.world).item()


class _Stage:
    """What the executor runs: the model on one microbatch."""

    def __init__(self, model, microbatches):
        self.model, self.microbatches = model, microbatches

    def empty_input(self, m):
        return self.model.empty_activation(self.microbatches[m].tokens)

    def forward(self, m, x):
        batch = self.microbatches[m]
        y = self.model(batch.ids if x is None else x, batch.tokens)
        return self.model.loss(y, batch.targets, batch.scale) if self.model.last_stage else y
