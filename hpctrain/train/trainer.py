"""One training step on the grid: pipeline, gradient sums, clipping, update."""

from __future__ import annotations

import torch

from hpctrain import comm
from hpctrain.pipeline import Executor, forward_only, one_f_one_b
from hpctrain.replicas import DataParallel
from hpctrain.train.clipping import clip, local_square


class Trainer:
    """Trains a model on a grid.

    Args:
        model: this rank's pipeline stage, such as `models.gpt2.GPT2`.
        grid: the process grid.
        optimizer: any torch optimizer over the model's parameters.
        microbatches: of a step, on each replica.
        max_norm: largest norm of the gradient; 0 for no clipping.
    """

    def __init__(self, model, grid, optimizer: torch.optim.Optimizer, microbatches: int = 1, max_norm: float = 0.0):
        self.model, self.grid, self.optimizer, self.max_norm = model, grid, optimizer, max_norm
        self.replicas = DataParallel(model.parameters(), grid)
        stages = grid.pipeline.size
        self._train = Executor(grid.pipeline, one_f_one_b(stages, microbatches))
        self._evaluate = Executor(grid.pipeline, forward_only(stages, microbatches))

    def step(self, microbatches: list) -> tuple[float, float]:
        """Train on this rank's microbatches; returns the loss before the update and the norm of its gradient.

        Raises:
            FloatingPointError: on every rank, when either is not finite; nothing is updated.
        """
        self.model.train()
        self.replicas.clear()
        losses = self._train.run(_Stage(self.model, microbatches), on_last_backward=self.replicas.overlap)
        self.replicas.finish()
        square = local_square(self.replicas.parameters, self.grid.coords)
        loss, square = self._total(losses, square)
        norm = square**0.5
        if not (loss - loss == 0 and norm - norm == 0):  # inf and nan are not equal to themselves minus themselves
            raise FloatingPointError(f"loss {loss} and gradient norm {norm} are not both finite")
        if self.max_norm:
            clip(self.replicas.parameters, norm, self.max_norm)
        self.optimizer.step()
        return loss, norm

    def evaluate(self, batches: list[list]) -> float:
        """The loss over all of `batches`, each a list of this rank's microbatches."""
        self.model.eval()
        losses = []
        with torch.no_grad():
            for microbatches in batches:
                losses += self._evaluate.run(_Stage(self.model, microbatches))
        return self._total(losses, torch.zeros(()))[0]

    def _total(self, losses: list[torch.Tensor], square: torch.Tensor) -> tuple[float, float]:
        """The losses summed over all ranks, and `square` over the ranks of one replica; the same on every rank."""
        loss = torch.stack(losses).double().sum().cpu() if losses else torch.zeros(())
        totals = torch.stack([loss.double(), square.double()])
        comm.all_reduce(totals, self.grid.tensor)
        comm.all_reduce(totals, self.grid.pipeline)
        comm.all_reduce(totals[:1], self.grid.data)
        return tuple(totals.tolist())


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
