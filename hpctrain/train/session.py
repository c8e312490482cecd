"""A training job's parts, built in order, each checked on all ranks before the next."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hpctrain import comm, models
from hpctrain.checkpoint import Checkpointer, TrainingState
from hpctrain.config import Config
from hpctrain.config.checks import check_grid, pipeline_schedule, token_slices
from hpctrain.data_parallel import Precision, make
from hpctrain.grid import Grid
from hpctrain.grid_shape import grid_arguments
from hpctrain.layers import algorithm_of
from hpctrain.layers.experts.experts import Experts
from hpctrain.models import ModelSpec
from hpctrain.models.partition import layers_per_stage
from hpctrain.models.pretrained import load
from hpctrain.models.staged import StagedTransformer
from hpctrain.models.staged_model import StagedModel
from hpctrain.pipeline import Schedule
from hpctrain.plan import predict
from hpctrain.randomness import RngKey
from hpctrain.train.agreement import Agreement
from hpctrain.train.dtypes import dtypes
from hpctrain.train.message_order import MessageOrder
from hpctrain.train.optimizer import make_optimizer
from hpctrain.train.rank_totals import RankTotals
from hpctrain.train.run_folder import RunFolder, goes_on
from hpctrain.train.same_training import check_same_training, description
from hpctrain.train.sanity import Sanity
from hpctrain.train.signals import Interrupts
from hpctrain.train.speeds import Speeds
from hpctrain.train.trainer import Trainer
from hpctrain.train.training_data import TrainingData, open_data

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass
class Position:
    """How far a training has come; saved with every checkpoint.

    Attributes:
        step: steps taken.
        batches: batches of the sample order that were used or left out.
        unevaluated: a step's record, where a stop left no time for its validation.
    """

    step: int = 0
    batches: int = 0
    unevaluated: dict[str, Any] | None = None


@dataclass
class Session:
    """What `train.loop` works with.

    Attributes:
        world: communicator (mpi4py) of all ranks, watched where the configuration says so.
        transport: in words, how tensors move.
        folder: the run folder, on rank 0; None on the others.
        resume: how the job was to be resumed, as `RunFolder` takes it.
        order: of messages, kept or repeated.
        totals: what this rank has spent and moved in this job.
    """

    config: Config
    grid: Grid
    world: Any
    device: torch.device
    transport: str
    key: RngKey
    data: TrainingData
    spec: ModelSpec
    model: StagedModel
    schedule: Schedule
    trainer: Trainer
    state: TrainingState
    folder: RunFolder | None
    checkpointer: Checkpointer
    sanity: Sanity
    speeds: Speeds
    agreement: Agreement
    resume: str
    order: MessageOrder
    position: Position = field(default_factory=Position)
    totals: RankTotals = field(default_factory=RankTotals)


def build(config: Config, world: MPI.Intracomm, resume: str = "", interrupts: Interrupts | None = None) -> Session:
    """The job that the configuration describes, at its last checkpoint where it is resumed. Collective over `world`.

    Args:
        world: communicator (mpi4py) of all ranks.
        resume: as `RunFolder` takes it.
        interrupts: why to stop early, or None.

    Raises:
        ValueError, OSError: on every rank, for a grid that does not fit the ranks, bad data, a folder that cannot be
            made, or checkpoints of which none can be used.
    """
    _check_alike(config, resume, world)
    check_grid(config, world.size)
    with comm.together(world):
        if world.rank == 0 and config.run.machine:
            predict(config, config.run.machine)  # that it can be compared at the end
    grid = Grid(
        *grid_arguments(config.grid_shape), config.grid.expert, config.grid.expert_tensor, comm=world,
        boxes=config.boxes,
    )  # fmt: skip
    watched: MPI.Intracomm | comm.WatchedComm = grid.comm
    if config.comm.watchdog:
        watched = comm.WatchedComm(comm.Watchdog(grid, config.comm.watchdog))
    if config.comm.check:
        comm.CollectiveChecker(grid)
    device = comm.local_device(config.run.device, world)
    for axis in (grid.data, grid.copies) if grid.expert.size > 1 else (grid.data,):
        comm.choose_all_reduce(axis, config.comm.all_reduce)
    transport = comm.decide_cuda_aware(grid, device)
    key = RngKey(config.run.seed)

    data = open_data(config, world, key)
    schedule = pipeline_schedule(config)
    resumes = False
    with comm.together(world):
        if grid.rank == 0:
            resumes = goes_on(config.folder, resume)
    spec, model, precision = _model(config, grid, device, schedule, key, world.bcast(resumes))
    trainer = _trainer(config, grid, model, schedule, precision)
    if not config.comm.watchdog:
        grid.transport.watchdog = None  # that of the trainer, for scripts

    folder = None
    with comm.together(world):
        if grid.rank == 0:
            folder = RunFolder(config, resume)
            if resumes and not folder.resumes:
                raise ValueError(f"another job began {folder.path} anew while this one started; start this one again")
    options = config.checkpoint
    checkpointer = Checkpointer(config.folder / "checkpoints", watched, options.keep, options.background)
    if interrupts:
        interrupts.saved = checkpointer.describe_newest
    sanity = Sanity(config.sanity.spike_factor)
    session = Session(
        config, grid, watched, device, transport, key, data, spec, model, schedule, trainer,
        TrainingState(model, trainer.strategy), folder, checkpointer, sanity,
        Speeds(grid, config.sanity.straggler, config.data_parallel.idle),
        Agreement(config, grid, trainer.strategy.lag, checkpointer, sanity, interrupts), resume,
        MessageOrder(config, grid, trainer),
    )  # fmt: skip
    if world.bcast(folder.resumes if folder else None):
        restore(session)
    with comm.together(world):
        if folder:
            folder.begin(session.position.step)
    return session


def _check_alike(config: Config, resume: str, world: MPI.Intracomm) -> None:
    given = {f"{name}.{key}": value for name, section in vars(config).items() for key, value in vars(section).items()}
    comm.check_started_alike(world, given | {"--resume": resume})


def restore(session: Session) -> bool:
    """To the newest valid checkpoint. Returns whether there is one; nothing is changed where there is none. Collective.

    Raises:
        ValueError: on every rank, when there are some but none can be used.
    """
    session.checkpointer.clean()
    manifest = session.checkpointer.resume(
        session.state, lambda found: check_same_training(found, session.config, session.data.facts)
    )
    if manifest is None:
        return False
    batches, unevaluated = manifest.member("data", "batches"), manifest.about.get("unevaluated")
    session.position = Position(manifest.step, batches, unevaluated)
    session.sanity.losses = manifest.member("sanity", "losses")
    return True


def about(session: Session) -> dict[str, Any]:
    """What a checkpoint of this moment says beside the tensors."""
    return description(session.config, session.grid) | {
        "data": {**session.data.facts, "batches": session.position.batches},
        "sanity": {"losses": session.sanity.losses},
        "unevaluated": session.position.unevaluated,
    }


def _model(
    config: Config, grid: Grid, device: torch.device, schedule: Schedule, key: RngKey, resumes: bool
) -> tuple[ModelSpec, StagedModel, Precision]:
    """Its kind, this rank's stages of it, and the precision that it is trained in. Where the job resumes, a checkpoint
    has the weights: the folder of model.init may be gone."""
    spec = models.get(config.model.kind)
    shape = spec.shape(vars(config.model))
    torch.set_float32_matmul_precision(config.precision.matmul)
    dtype, precision = dtypes(config.precision)
    sequences = -(-config.train.batch // (grid.replica.size * schedule.microbatches))
    blocks = layers_per_stage(
        grid.comm, spec, shape, config.pipeline.partition, sequences, schedule.ranks, schedule.microbatches,
        stages=schedule.graph.stages, schedule=schedule.name, dtype=dtype, device=device,
    )  # fmt: skip
    model = spec.build(
        grid, shape, blocks, schedule.placement,
        algorithm=algorithm_of(grid, config.tensor.algorithm, config.tensor.overlap),
        recompute=config.train.recompute, key=key, dtype=dtype, device=device,
    )  # fmt: skip
    if isinstance(model, StagedTransformer) and model.last in model.stages:
        model.cross_entropy.label_smoothing = config.train.label_smoothing
        model.cross_entropy.z_loss = config.train.z_loss
    for module in model.modules():
        if isinstance(module, Experts):
            module.dispatch, module.replicate_hot = config.experts.dispatch, config.experts.replicate_hot
    if config.model.init and not resumes:
        with comm.together(grid.world):
            load(spec, model, Path(config.model.init))
    return spec, model, precision


def _trainer(config: Config, grid: Grid, model: StagedModel, schedule: Schedule, precision: Precision) -> Trainer:
    train = config.train
    optimizer = make_optimizer(
        model.parameters(), train.weight_decay, train.optimizer, train.momentum, train.betas, train.eps, train.ema_decay
    )
    strategy = make(config.data_parallel, model, grid, optimizer, precision)
    slices = token_slices(config)
    return Trainer(model, grid, optimizer, schedule, max_norm=train.clip, strategy=strategy, slices=slices)
