"""Forward and backward of one step: of a model that every rank calls as a whole, and of one cut into stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from hpctrain import comm
from hpctrain.data_parallel import DataParallel, DataParallelStrategy
from hpctrain.grid import Grid
from hpctrain.layers import Router, SplitBackward
from hpctrain.models.staged_model import StagedModel
from hpctrain.parameter import shard_of
from hpctrain.pipeline import Schedule, forward_only
from hpctrain.pipeline.actions import Action
from hpctrain.pipeline.executor import Executor, StageWork
from hpctrain.pipeline.network import Network
from hpctrain.train.stages import Stages
from hpctrain.train.versions import Versions

if TYPE_CHECKING:
    from hpctrain.convert.pipeline import PipelineStages


class WholeModel:
    """Batches one after another; gradients add up, and are summed over ranks during the last backward.

    Args:
        loss: function (model, batch) -> scalar.
    """

    updates = False  # the update is the caller's

    def __init__(self, model: torch.nn.Module, loss: Callable, strategy: DataParallelStrategy):
        self.model, self.loss, self.strategy = model, loss, strategy
        self._routers = [module for module in model.modules() if isinstance(module, Router)]

    def check(self, batches: list) -> None:
        """Any number of batches will do, also none on some replicas."""

    def train(self, batches: list) -> list[torch.Tensor]:
        losses = []
        for router in self._routers:
            router.loss_scale = self.strategy.loss_scale
        try:
            for number, batch in enumerate(batches):
                value = self.loss(self.model, batch)
                if not isinstance(value, torch.Tensor) or value.dim() or not value.requires_grad:
                    got = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) and value.dim() else value
                    raise ValueError(f"loss must give a scalar tensor that depends on the weights, got {got}")
                if self.strategy.loss_scale != 1:  # which float16 could not hold
                    value = value.float() * self.strategy.loss_scale
                if number == len(batches) - 1:
                    self.strategy.enable_grad_sync()
                value.backward()
                losses.append(value.detach())
        finally:
            for router in self._routers:
                router.loss_scale = 1.0
        return losses

    def evaluate(self, batches: list) -> list[torch.Tensor]:
        return [self.loss(self.model, batch) for batch in batches]

    def report(self) -> dict:
        return {}


class PipelinedModel:
    """Microbatches through this rank's stages, by the program that the schedule gives the rank.

    Args: as of `train.trainer.Trainer`, and such as `check_pipelined` takes.

    Attributes: `updates`, whether the schedule updates each stage by itself, on the way.
    """

    def __init__(
        self, model: StagedModel | Network | PipelineStages, grid: Grid, schedule: Schedule,
        strategy: DataParallelStrategy, slices: Sequence[int] = (),
    ):  # fmt: skip
        self.model, self.schedule, self.strategy, self.slices = model, schedule, strategy, tuple(slices)
        self.updates = schedule.delayed
        split_backward = SplitBackward(model, grid.pipeline) if schedule.splits else None
        self._train = Executor(grid.pipeline, schedule, split_backward)
        forwards = forward_only(
            schedule.ranks, schedule.microbatches, schedule.placement, schedule.replica_of, schedule.graph
        )
        self._evaluate = Executor(grid.pipeline, forwards)
        self._completed = self._completed_by()

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

    def _trained(self, stage: int) -> Iterator[torch.nn.Parameter]:
        return (p for p in self.model.parameters_of(stage) if p.requires_grad)

    def train(self, microbatches: list) -> list[torch.Tensor]:
        """The losses of the microbatches whose last stage is here; their sum is that of the step."""
        if self.updates:
            assert isinstance(self.model, StagedModel)  # others keep one version of their weights
            losses = self._train.run(Versions(self.model, microbatches, self.strategy))
            losses = [loss / len(self.schedule.updates) for loss in losses]
        else:
            work = self._work(microbatches, self.slices, self.strategy.loss_scale)
            losses = self._train.run(work, self._last_backward)
        self.model.check_draws()
        return losses

    def evaluate(self, microbatches: list) -> list[torch.Tensor]:
        return self._evaluate.run(self._work(microbatches))

    def report(self) -> dict:
        return {}

    def check(self, microbatches: list) -> None:
        """Raise ValueError for another number of microbatches than the schedule's, and what a Network cannot take."""
        if len(microbatches) != self.schedule.microbatches:
            raise ValueError(
                f"{self.schedule.name} is made for {self.schedule.microbatches} microbatches on each replica, got "
                f"{len(microbatches)}; some may be empty"
            )
        if isinstance(self.model, Network):
            self.model.check_pairs(microbatches)

    def _work(self, microbatches: list, slices: Sequence[int] = (), scale: float = 1.0) -> StageWork:
        if isinstance(self.model, StagedModel):
            return Stages(self.model, microbatches, slices, scale)
        if scale != 1:
            raise ValueError(f"{type(self.model).__name__} does not scale its loss, which float16 needs; use bfloat16")
        return self.model.work(microbatches)

    def _last_backward(self, action: Action) -> None:
        self.strategy.enable_grad_sync(self._completed[action.replica, action.stage])


def check_pipelined(
    model: StagedModel | Network | PipelineStages, grid: Grid, schedule: Schedule,
    strategy: type[DataParallelStrategy], max_norm: float, slices: Sequence[int],
) -> None:  # fmt: skip
    """Raise ValueError, on every rank, for what a `PipelinedModel` with this kind of strategy does not do."""
    check_placement(schedule, model)
    if schedule.delayed:
        with comm.together(grid.world):  # not every rank holds weights that are shared
            check_own_updates(schedule.name, model, strategy, max_norm)
    if max(1, len(slices)) != schedule.slices or min(slices, default=1) < 1:
        raise ValueError(
            f"slices={list(slices)}: {schedule.name} is made for {schedule.slices} slices, each of at least a token"
        )
    if slices and isinstance(model, StagedModel) and model.recompute == "block":
        raise ValueError(
            f"{schedule.name} keeps the keys and values of every slice, which recompute='block' would add once "
            "more in backward; use recompute='none' or 'attention'"
        )


def check_placement(schedule: Schedule, model: StagedModel | Network | PipelineStages) -> None:
    """Raise ValueError unless the model has its stages on the schedule's ranks."""
    if schedule.placement != model.placement:
        raise ValueError(
            f"the schedule {schedule.name} places the stages as {schedule.placement}, the model as {model.placement}; "
            "make the model with placement=schedule.placement"
        )


def check_own_updates(name: str, model: object, strategy: type[DataParallelStrategy], max_norm: float) -> None:
    """Raise ValueError for what does not go with stages, or nodes, that update by themselves."""
    if max_norm:
        raise ValueError(
            f"{name} updates each stage by itself and cannot clip the gradient of all to max_norm={max_norm}; use no "
            "clipping (train.clip=0)"
        )
    if strategy is not DataParallel:
        raise ValueError(
            f"{name} works with data_parallel.method=ddp in one precision, got {strategy.__name__}; use "
            "precision.compute=fp32 or fp64 with it"
        )
    if not isinstance(model, StagedModel):
        return
    stages = [set(model.parameters_of(stage)) for stage in model.stages]  # of which a rank may have several
    if any(shard_of(p).holders for p in model.parameters()) or len(set().union(*stages)) < sum(map(len, stages)):
        raise ValueError(
            f"{name} updates each stage by itself, so that stages cannot share weights; use untied embeddings "
            "(model.tied=false)"
        )
    if model.recompute == "block":
        raise ValueError(
            f"{name} differentiates by the weights of a microbatch's forward, and recompute='block' computes blocks "
            "once more with newer ones; use recompute='none' or 'attention'"
        )
