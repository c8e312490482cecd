"""Training steps of a model that is cut into pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hpctrain import comm
from hpctrain.layers import WeightGradients
from hpctrain.pipeline import Executor, Schedule, forward_only, one_f_one_b
from hpctrain.replicas import DataParallel
from hpctrain.train import step
from hpctrain.train.stages import Stages
from hpctrain.train.versions import Versions


class Trainer(step.Trainer):
    """Trains a model on any grid.

    Args:
        model: this rank's pipeline stages, placed as the schedule says: `models.gpt2.GPT2`, or a `pipeline.Network`.
        grid: the process grid.
        optimizer: any torch optimizer over the model's parameters.
        schedule: of the pipeline; a number means 1F1B of so many microbatches a step on each replica.
        max_norm: largest norm of the gradient; 0 for no clipping.
        slices: lengths of the token slices, where the schedule cuts sequences (`terapipe`).
        replicas: one of `ht.replicas` over the same parameters and optimizer; by default `DataParallel`.

    Raises:
        ValueError: on every rank, for a schedule that places stages elsewhere than the model, and where a schedule that
            updates each stage by itself (`pipedream`, `pipedream-2bw`) meets clipping or weights that stages share.
    """

    def __init__(
        self, model, grid, optimizer: torch.optim.Optimizer, schedule: Schedule | int = 1, max_norm: float = 0.0,
        replicas=None, slices: Sequence[int] = (),
    ):  # fmt: skip
        super().__init__(model, grid, optimizer, max_norm, replicas)
        if isinstance(schedule, int):
            schedule = one_f_one_b(grid.pipeline.size, schedule)
        if schedule.placement != model.placement:
            raise ValueError(
                f"the schedule {schedule.name} places the stages as {schedule.placement}, the model as "
                f"{model.placement}; make the model with placement=schedule.placement"
            )
        if schedule.delayed:
            with comm.together(grid.comm):  # not every rank holds weights that are shared
                self._check_delayed(schedule)
        if max(1, len(slices)) != schedule.slices:
            raise ValueError(f"slices={list(slices)}: {schedule.name} is made for {schedule.slices} slices of tokens")
        self.schedule, self.slices = schedule, tuple(slices)
        later = WeightGradients(model, grid.pipeline) if schedule.splits else None
        self._train = Executor(grid.pipeline, schedule, later)
        forwards = forward_only(
            schedule.ranks, schedule.microbatches, schedule.placement, schedule.replica_of, schedule.graph
        )
        self._evaluate = Executor(grid.pipeline, forwards)
        self._completed = self._completed_by()

    def _check(self, grid):
        """Any number of stages will do."""

    def _check_delayed(self, schedule):
        if self.max_norm:
            raise ValueError(
                f"{schedule.name} updates each stage by itself and cannot clip the gradient of all to "
                f"max_norm={self.max_norm}; use no clipping (train.clip=0)"
            )
        if "prefetch" in getattr(self.model.algorithm, "overlap", ()):
            raise ValueError(f"{schedule.name} has several versions of weights: take prefetch out of tensor.overlap")
        if type(self.replicas) is not DataParallel:
            raise ValueError(f"{schedule.name} works with replicas.method=ddp, got {type(self.replicas).__name__}")
        if any(p.shard.holders for p in self.model.parameters()):
            raise ValueError(
                f"{schedule.name} updates each stage by itself, so that stages cannot share weights; use untied "
                "embeddings (model.tied=false)"
            )

    def _completed_by(self) -> dict[tuple[int, int], list[torch.nn.Parameter]]:
        """The parameters whose gradients are complete with the last backward of each (replica, stage)."""
        places = self._train.last_backwards
        whole = {stage for _, stage in places}
        later = {p for stage in self.model.stages if stage not in whole for p in self._trained(stage)}
        completed = {}
        for place in reversed(places):
            mine = [p for p in dict.fromkeys(self._trained(place[1])) if p not in later]
            completed[place] = mine
            later.update(mine)  # of two stages that share a parameter, the later one completes it
        return completed

    def _trained(self, stage):
        return (p for p in self.model.parameters_of(stage) if p.requires_grad)

    def step(self, microbatches: list) -> tuple[float, float]:
        """Train on this rank's microbatches; returns the loss before the update and the norm of its gradient.

        Where every few microbatches have an update of their own, the mean of their losses, and the norm of the last
        one's gradient.

        Raises:
            ValueError: for another number of microbatches than the schedule's.
            FloatingPointError: on every rank, when either is not finite; nothing is updated (but by schedules that
                update on the way).
        """
        self._check_number(microbatches)
        self._check_frozen()
        self.model.train()
        self.replicas.clear()
        if self.schedule.delayed:
            losses = self._train.run(Versions(self.model, microbatches, self.replicas))
            return self._totals([loss / len(self.schedule.updates) for loss in losses])
        work = self._work(microbatches, self.slices, self.replicas.loss_scale)
        losses = self._train.run(work, self._last_backward)
        if hasattr(self.model, "check_draws"):
            self.model.check_draws()
        return self._update(losses)

    def _check_number(self, microbatches):
        if len(microbatches) != self.schedule.microbatches:
            raise ValueError(
                f"{self.schedule.name} is made for {self.schedule.microbatches} microbatches on each replica, got "
                f"{len(microbatches)}; some may be empty"
            )

    def _work(self, microbatches, slices=(), scale=1.0):
        if not hasattr(self.model, "work"):
            return Stages(self.model, microbatches, slices, scale)
        if scale != 1:
            raise ValueError(f"{type(self.model).__name__} does not scale its loss, which float16 needs; use bfloat16")
        return self.model.work(microbatches)

    def _last_backward(self, action) -> None:
        self.replicas.overlap(self._completed[action.replica, action.stage])

    def evaluate(self, batches: list[list], stops: Callable[[], bool] = lambda: False) -> float | None:
        """The loss over all of `batches`, each a list of this rank's microbatches.

        None where `stops`, asked on all ranks before each batch, says on all of them that there is no time for it.
        """
        self.model.eval()
        losses = []
        with torch.no_grad(), self.replicas.whole():
            for microbatches in batches:
                if stops():
                    return None
                self._check_number(microbatches)
                losses += self._evaluate.run(self._work(microbatches))
        return comm.all_reduce(self._share(losses), self.grid.world).item()
