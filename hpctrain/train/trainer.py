"""Training steps of any model on its grid: forward, backward, gradient sums, clipping, update."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hpctrain import comm
from hpctrain.choices import check_by_elements
from hpctrain.data_parallel import DataParallel, DataParallelStrategy, Zero3
from hpctrain.data_parallel.clipping import check_max_norm
from hpctrain.given import check_types
from hpctrain.grid import Grid
from hpctrain.grid_shape import describe_shape
from hpctrain.layers.experts.balance import Load, LoadBalance
from hpctrain.models.staged import StagedTransformer
from hpctrain.models.staged_model import StagedModel
from hpctrain.one_line import parallelize
from hpctrain.parameter import shard_of
from hpctrain.pipeline import AMPNet, Schedule, one_f_one_b
from hpctrain.pipeline.ampnet import MessageNetwork
from hpctrain.pipeline.network import Network
from hpctrain.rank_gradient import as_tensors
from hpctrain.shard import check_shards
from hpctrain.train import expert_load
from hpctrain.train.forward_backward import PipelinedModel, WholeModel, check_pipelined, check_placement
from hpctrain.train.message_driven import MessageDriven, check_message_driven

log = logging.getLogger("hpctrain")


class Trainer:
    """Trains a model on its grid. One that every rank calls as a whole, of `ht.layers` or made by `ht.parallelize`, is
    given with its loss; so is a plain one, which is parallelized first:

        share = lambda model, batch: F.cross_entropy(model(batch.x), batch.y) / replicas
        trainer = ht.Trainer(model, grid, torch.optim.AdamW(model.parameters()), loss=share)
        loss, norm = trainer.step([batch])

    One that is cut into pipeline stages, of `ht.models` or a `pipeline.Network`, has a loss of its own, and a schedule:

        trainer = ht.Trainer(network, grid, torch.optim.AdamW(network.parameters()), schedule)
        loss, norm = trainer.step(microbatches)

    So has a `pipeline.ampnet.MessageNetwork`, whose ranks work on whatever has arrived:

        trainer = ht.Trainer(network, grid, optimizer, AMPNet(max_active_keys=4))
        loss, norm = trainer.step(instances)

    Args:
        grid: the process grid.
        optimizer: any torch optimizer over the model's parameters that treats every element by itself.
        schedule: of a model that is cut into stages, placed as the model is; a number n, by default 1, means 1F1B of n
            microbatches a step on each replica. Or an `AMPNet`, of a `MessageNetwork` or a chain of stages.
        loss: function (model, batch) -> scalar, to be summed over the batches of a step and over the replicas. Nothing
            scales it afterwards, so it is divided by the number of samples or tokens in the batches of all replicas.
        max_norm: largest norm of the gradient; 0 for no clipping.
        strategy: one of `ht.data_parallel` over the same parameters, grid and optimizer; by default `DataParallel`.
        slices: lengths of the token slices that the schedule cuts the sequences of a model of `ht.models` into
            (`terapipe`); they add up to the length of a sequence.

    From here on a watchdog ends the job where an operation of communication takes longer than HPCTRAIN_WATCHDOG seconds
    (600; 0 is never), unless the grid has one.

    Raises:
        ValueError: on every rank, for an optimizer that mixes the elements of a weight; a model that is not cut into
            stages and has no `loss`, or meets a pipeline axis or a schedule; a schedule that places stages elsewhere
            than the model, or trains nothing; one that updates each stage by itself (`pipedream`, `pipedream-2bw`,
            `ampnet`) where gradients are clipped, stages share weights or blocks are recomputed; `ampnet` where there
            are data or tensor axes; slices that nobody cuts; and a strategy of another grid or optimizer.
    """

    def __init__(
        self, model: torch.nn.Module, grid: Grid, optimizer: torch.optim.Optimizer,
        schedule: Schedule | AMPNet | int | None = None, *, loss: Callable | None = None, max_norm: float = 0.0,
        strategy: DataParallelStrategy | None = None, slices: Sequence[int] = (),
    ):  # fmt: skip
        check_types(model=(model, torch.nn.Module), grid=(grid, Grid), optimizer=(optimizer, torch.optim.Optimizer))
        if loss is not None:
            check_types(loss=(loss, Callable))
        check_by_elements(optimizer)
        check_max_norm(max_norm)
        plain = _is_plain(model)
        if not plain:
            check_shards(model)
        _check_schedule(model, schedule, loss, slices)
        _check_kind(model, grid, schedule, loss)
        if strategy is not None:
            _check_strategy(strategy, grid, optimizer)
        comm.start_watchdog(grid)
        if isinstance(schedule, Schedule) and schedule.asynchronous:
            assert isinstance(model, StagedModel)
            check_placement(schedule, model)
            schedule = schedule.asynchronous
        stages = getattr(model, "hpctrain_pipeline", None)  # of ht.parallelize
        staged: Any = model if stages is None else stages
        made = DataParallel if strategy is None else type(strategy)
        if stages is not None and issubclass(made, Zero3):
            raise ValueError("zero3 gathers the weights of whole models, got pipeline stages; use Zero1 or Zero2")
        if isinstance(schedule, AMPNet):
            assert isinstance(model, (StagedModel, MessageNetwork))
            check_message_driven(model, grid, made, max_norm)
        elif stages is not None or loss is None:
            if not isinstance(schedule, Schedule):
                schedule = one_f_one_b(grid.pipeline.size, schedule or 1)
            check_pipelined(staged, grid, schedule, made, max_norm, slices)
        if plain:
            model = _divided(model, grid, optimizer)
        if any(hasattr(p, "replicas") for p in model.parameters()):
            raise ValueError(
                "ht.parallelize(zero=...) is for a loop of one's own: leave zero out, and give the Trainer a strategy, "
                "as ht.data_parallel.Zero1(model.parameters(), grid, optimizer)"
            )
        self.model, self.grid, self.optimizer, self.max_norm = model, grid, optimizer, max_norm
        # An earlier strategy hands over to this one: whatever is refused was so before.
        self.strategy = strategy or DataParallel([p for p in model.parameters() if p.requires_grad], grid, optimizer)
        self._passes: PipelinedModel | WholeModel | MessageDriven
        if isinstance(schedule, AMPNet):
            assert isinstance(model, (StagedModel, MessageNetwork))
            self._passes = MessageDriven(model, grid, schedule, self.strategy)
        elif isinstance(schedule, Schedule):
            staged = model if stages is None else stages.with_loss(loss)
            self._passes = PipelinedModel(staged, grid, schedule, self.strategy, slices)
        else:
            assert loss is not None
            self._passes = WholeModel(model, loss, self.strategy)
        self._balance, self._loss_scale = LoadBalance(model, grid), 1.0
        self._loads: dict[str, Load] = {}
        self._named_unused = False
        self._frozen = [p for p in model.parameters() if not p.requires_grad]
        # What parallelize made gives the one loss on every rank of a replica; others give each rank its share.
        self._counts_loss = grid.tensor.rank == grid.sequence.rank == 0 or not hasattr(model, "hpctrain_grid")

    def step(self, batches: list) -> tuple[float, float]:
        """Train on this replica's batches, one after another, or on its microbatches of a pipeline. Returns the loss
        before the update, and the norm of its gradient.

        Where every few microbatches have an update of their own, the mean of their losses, and the norm of the last
        one's gradient.

        Raises:
            ValueError: for another number of microbatches than the schedule's, and when a weight is trained that was
                frozen when the trainer was made.
            FloatingPointError: on every rank, when either is not finite; nothing is updated (but by schedules that
                update on the way). Of an `AsyncParameterServer`, on the worker alone whose they are.
        """
        loss, norm, overflow = self.forward_backward(batches)
        if not overflow:
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise FloatingPointError(f"loss {loss} and gradient norm {norm} are not both finite")
            self.update(norm)
        return loss, norm

    def forward_backward(self, batches: list) -> tuple[float, float, bool]:
        """`step` without the update, for whoever decides in between: `update(norm)` makes it. Returns loss, norm, and
        whether the gradient overflowed in float16, so that the step is to be left out."""
        self._check(batches)
        self._check_frozen()
        self.model.train()
        self.strategy.zero_grad()
        self._balance.clear()
        self._loads = {}
        self._loss_scale = self.strategy.loss_scale
        losses = self._passes.train(batches)
        if not self._passes.updates:
            self.strategy.finish_grad_sync()
            self._name_unused()
        loss, norm = self.strategy.loss_and_grad_norm(self._share(losses))
        return loss, norm, self.strategy.overflows(loss, norm)

    def update(self, norm: float) -> None:
        """Change the weights by the gradient, whose norm `forward_backward` gave."""
        if not self._passes.updates:
            self.strategy.step(norm, self.max_norm)
        self._loads = self._balance.finish_step(self._loss_scale)

    def evaluate(
        self, batches: list[list], stops: Callable[[], bool] = lambda: False, averaged: bool = False
    ) -> float | None:
        """The loss over all of `batches`, each a list as `step` takes; of the weights, or of their moving average where
        the optimizer keeps one.

        None where `stops`, asked on all ranks before each list, says on all of them that there is no time for it.

        Raises:
            ValueError: as `step`, for any of the lists, before the first is evaluated.
        """
        for part in batches:
            self._check(part)
        self.model.eval()
        losses = []
        average = self.strategy.averaged_weights() if averaged else contextlib.nullcontext()
        with torch.no_grad(), average, self.strategy.full_weights():
            for part in batches:
                if stops():
                    return None
                losses += self._passes.evaluate(part)
        return comm.all_reduce(self._share(losses), self.grid.world).item()

    @property
    def message_driven(self) -> MessageDriven:
        """How an `AMPNet` goes: its record, replay and metrics."""
        if not isinstance(self._passes, MessageDriven):
            raise ValueError("message_driven is of a Trainer whose schedule is an AMPNet, got another schedule")
        return self._passes

    def report(self) -> dict:
        """Members for the step's line of metrics; collective."""
        return self.strategy.report() | self._passes.report() | expert_load.metrics(self._loads)

    def _check(self, batches: list) -> None:
        if not isinstance(batches, (list, tuple)):  # of a tensor, every row would be taken for a batch
            raise ValueError(f"batches must be a list, such as [batch], got a {type(batches).__name__}")
        self._passes.check(batches)

    def _check_frozen(self) -> None:
        with as_tensors():  # a parallelized weight takes long to be asked
            thawed = any(p.requires_grad for p in self._frozen)
        if thawed:
            raise ValueError(
                "a weight that was frozen when the trainer was made requires its gradient now, which nobody would sum; "
                "make the trainer, and its optimizer, after freezing and unfreezing"
            )

    def _name_unused(self) -> None:
        """Once: warn of weights that no replica's loss depends on. Of those that other pipeline ranks hold too, a loss
        may depend there."""
        if self._named_unused or self.strategy.lag:
            return
        self._named_unused = True
        unused = set(self.strategy.unused())
        names = [name for name, p in self.model.named_parameters() if p in unused and not shard_of(p).holders]
        if names and self.grid.data.rank == self.grid.tensor.rank == 0:
            log.warning("the loss does not depend on %s: their gradients are taken as zero", ", ".join(names))

    def _share(self, losses: list[torch.Tensor]) -> torch.Tensor:
        """What this rank adds to the loss, float64."""
        counted = losses and self._counts_loss
        return torch.stack(losses).double().sum().cpu() if counted else torch.zeros((), dtype=torch.float64)


def _is_plain(model) -> bool:
    """Whether nobody has said what ranks hold of its weights; of a network that is cut, a rank may have none."""
    parameters = list(model.parameters())
    return bool(parameters) and not any(hasattr(p, "shard") for p in parameters)


def _divided(model, grid, optimizer) -> torch.nn.Module:
    """A plain module by the one line; its parameters stay the same objects, so that the optimizer has them."""
    if optimizer.state:
        raise ValueError(
            f"{type(model).__name__} is a plain module, and its optimizer has states of whole weights already: call "
            "ht.parallelize(model, grid) before the first step of the optimizer"
        )
    return parallelize(model, grid)


def _check_strategy(strategy, grid, optimizer) -> None:
    check_types(strategy=(strategy, DataParallelStrategy))
    kind = type(strategy).__name__
    same = {"optimizer": strategy.optimizer is optimizer, "grid": strategy.grid.shape == grid.shape}
    if other := [name for name, is_same in same.items() if not is_same]:
        raise ValueError(
            f"strategy must have the {other[0]} of the Trainer, got a {kind} of another; use "
            f"{kind}(parameters, grid, optimizer) of the same grid and optimizer"
        )


def _check_schedule(model, schedule, loss, slices) -> None:
    """Raise ValueError for what is no schedule or trains nothing, and for slices that nobody would cut."""
    number = isinstance(schedule, int) and not isinstance(schedule, bool) and schedule >= 1
    trains = isinstance(schedule, AMPNet) or (isinstance(schedule, Schedule) and schedule.training)
    if not (schedule is None or number or trains):
        raise ValueError(
            "schedule must be a number of microbatches from 1 on, a pipeline.Schedule that trains, or an AMPNet, got "
            f"{getattr(schedule, 'name', schedule)!r}; use pipeline.schedule(name, ranks, microbatches)"
        )
    if len(slices) and (loss is not None or _is_delayed(schedule) or not isinstance(model, StagedTransformer)):
        raise ValueError(
            f"slices={list(slices)}: only a pipelined model of ht.models, without loss= and with a schedule such as "
            "terapipe, takes sequences in slices, and none of plain torch modules; leave slices out"
        )


def _is_delayed(schedule) -> bool:
    return isinstance(schedule, AMPNet) or getattr(schedule, "delayed", False)


def _check_kind(model, grid, schedule, loss) -> None:
    """Raise ValueError unless the model is a whole one with a loss, or one that is cut into stages; of this grid."""
    kind = type(model).__name__
    made_for = getattr(model, "hpctrain_grid", grid)
    if made_for.shape != grid.shape:
        raise ValueError(
            f"{kind} was made by ht.parallelize for {describe_shape(made_for.shape)}, and the Trainer got "
            f"{describe_shape(grid.shape)}: give it the same grid"
        )
    if hasattr(model, "hpctrain_pipeline"):
        if loss is None or _is_delayed(schedule):
            raise ValueError(
                f"{kind} is cut into pipeline stages by ht.parallelize: give the Trainer loss=, a function (model, "
                "microbatch), and a schedule with a flush, such as 1f1b, or the number of microbatches"
            )
        return
    if loss is None and not isinstance(model, (StagedModel, Network, MessageNetwork)):
        raise ValueError(f"{kind} is not cut into pipeline stages: give the Trainer loss=, a function (model, batch)")
    if loss is not None and grid.pipeline.size > 1:
        raise ValueError(
            f"got a grid with pipeline={grid.pipeline.size} and a loss of the whole model: use pipeline=1, or a model "
            "that is cut into stages, of ht.models or a pipeline.Network, which has a loss of its own"
        )
    if loss is not None and schedule is not None:
        raise ValueError("schedule is for a model that is cut into pipeline stages, which has a loss of its own")
    fits = isinstance(schedule, AMPNet) if isinstance(model, MessageNetwork) else not _is_delayed(schedule)
    if loss is None and isinstance(model, (Network, MessageNetwork)) and not fits:
        raise ValueError(
            f"a Network is run by a Schedule with a flush, as 1f1b, and a MessageNetwork by an AMPNet, got a {kind}"
        )
