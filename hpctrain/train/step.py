"""Training steps of a whole model: forward, backward, gradient sums, clipping, update."""

from __future__ import annotations

import logging
import math

import torch

from hpctrain.algorithms import MIXING_OPTIMIZERS
from hpctrain.replicas import DataParallel
from hpctrain.shard import check_shards

log = logging.getLogger("hpctrain")


class Trainer:
    """Trains a model that `ht.parallelize` made, or one of `ht.layers`.

        trainer = ht.Trainer(model, grid, torch.optim.AdamW(model.parameters()))
        loss, norm = trainer.step([batch], lambda model, batch: F.cross_entropy(model(batch.x), batch.y) / replicas)

    Args:
        optimizer: any torch optimizer over the model's parameters that treats every element by itself.
        max_norm: largest norm of the gradient; 0 for no clipping.
        replicas: one of `ht.replicas` over the same parameters and optimizer; by default `DataParallel`.

    Raises:
        ValueError: when the optimizer mixes the elements of a weight, or the grid has a pipeline axis.
    """

    def __init__(
        self, model: torch.nn.Module, grid, optimizer: torch.optim.Optimizer, max_norm: float = 0.0, replicas=None
    ):
        kind = type(optimizer).__name__
        if kind.lower() in MIXING_OPTIMIZERS:
            raise ValueError(
                f"optimizer must treat every element of a weight by itself, got {kind}, which needs "
                f"{MIXING_OPTIMIZERS[kind.lower()]}; AdamW does"
            )
        self._check(grid)
        check_shards(model)
        self.model, self.grid, self.optimizer, self.max_norm = model, grid, optimizer, max_norm
        self.replicas = replicas or DataParallel([p for p in model.parameters() if p.requires_grad], grid, optimizer)
        self.check = check_finite  # called before every update, with loss and norm; raises where it must not be made
        self._named_unused = False
        self._frozen = [p for p in model.parameters() if not p.requires_grad]
        # What parallelize made gives the one loss on every rank of the tensor axis; others give each rank its share.
        self._counts_loss = grid.tensor.rank == 0 or not hasattr(model, "hpctrain_grid")

    def _check(self, grid):
        if grid.pipeline.size > 1:
            raise ValueError(
                f"got pipeline={grid.pipeline.size}: models cut into stages are trained by train.trainer.Trainer"
            )

    def step(self, batches: list, loss) -> tuple[float, float]:
        """Train on this replica's `batches`, one after another; returns the loss before the update, and the norm of
        its gradient.

        Args:
            loss: function (model, batch) -> scalar to sum over batches and replicas. Nothing scales it afterwards, so
                it is divided by the number of samples or tokens in the batches of all replicas.

        Raises:
            ValueError: when a weight is trained that was frozen when the trainer was made.
            FloatingPointError: on every rank, when either is not finite; nothing is updated.
        """
        self._check_frozen()
        self.model.train()
        self.replicas.clear()
        losses = []
        for number, batch in enumerate(batches):
            value = loss(self.model, batch)
            if self.replicas.loss_scale != 1:  # which float16 could not hold
                value = value.float() * self.replicas.loss_scale
            if number == len(batches) - 1:
                self.replicas.overlap()
            value.backward()
            losses.append(value.detach())
        return self._update(losses)

    def _check_frozen(self) -> None:
        if any(p.requires_grad for p in self._frozen):
            raise ValueError(
                "a weight that was frozen when the trainer was made requires its gradient now, which nobody would sum; "
                "make the trainer, and its optimizer, after freezing and unfreezing"
            )

    def _update(self, losses: list[torch.Tensor]) -> tuple[float, float]:
        """Sum, clip and apply the gradients of this rank's `losses`."""
        self.replicas.finish()
        if self.replicas.lockstep and not self._named_unused:
            self._named_unused = True
            self._name_unused()
        loss, norm = self.replicas.totals(self._share(losses))
        if not self.replicas.overflows(loss, norm):
            self.check(loss, norm)
            self.replicas.update(norm, self.max_norm)
        return loss, norm

    def _name_unused(self) -> None:
        unused = set(self.replicas.unused())
        names = [name for name, p in self.model.named_parameters() if p in unused]
        if names and self.grid.data.rank == self.grid.tensor.rank == 0:
            log.warning("the loss does not depend on %s: their gradients are taken as zero", ", ".join(names))

    def _totals(self, losses: list[torch.Tensor]) -> tuple[float, float]:
        """The loss and the norm of the gradient, finite."""
        loss, norm = self.replicas.totals(self._share(losses))
        self.check(loss, norm)
        return loss, norm

    def _share(self, losses: list[torch.Tensor]) -> torch.Tensor:
        """What this rank adds to the loss, float64."""
        counted = losses and self._counts_loss
        return torch.stack(losses).double().sum().cpu() if counted else torch.zeros((), dtype=torch.float64)


def check_finite(loss: float, norm: float) -> None:
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise FloatingPointError(f"loss {loss} and gradient norm {norm} are not both finite")
