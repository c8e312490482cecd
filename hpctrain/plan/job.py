"""What a configuration asks for: the part that a search leaves alone, and the part that it chooses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from hpctrain import models
from hpctrain.config import Config, DataParallelConfig
from hpctrain.config.checks import token_slices
from hpctrain.grid_shape import grid_shape
from hpctrain.models import TransformerCosts

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
Box = tuple[int, int, int]
MOMENTS = {"adamw": 2, "adam": 2, "nadam": 2, "radam": 2, "adamax": 2, "adagrad": 1, "rmsprop": 2, "sgd": 1}


class Choice(NamedTuple):
    """One point of the search: how a job is laid out on ranks. All are settings of the configuration.

    Attributes:
        partition: layers of each stage; () for an even cut.
        boxes: of each rank of the pipeline axis; () where all have x × y × z.
    """

    data: int
    pipeline: int
    x: int
    y: int
    z: int
    microbatches: int
    schedule: str
    virtual_stages: int
    recompute: str
    method: str
    algorithm: str
    ring: int = 1
    ulysses: int = 1
    expert: int = 1
    expert_tensor: int = 1
    partition: tuple[int, ...] = ()
    boxes: tuple[Box, ...] = ()

    def at(self, rank: int) -> Choice:
        """With the box of this rank of the pipeline axis."""
        if not self.boxes:
            return self
        x, y, z = self.boxes[rank]
        return self._replace(x=x, y=y, z=z, boxes=())

    @property
    def replicas(self) -> int:
        """Ranks of the data axis: all that hold the same weights."""
        return self.data * self.ring * self.ulysses

    @property
    def ranks(self) -> int:
        return self.replicas * self.pipeline * math.prod(self.box)

    @property
    def box(self) -> Box:
        return self.x, self.y, self.z

    @property
    def grid(self) -> dict[str, int]:
        """Sizes of the axes, as of `Grid.shape`."""
        return grid_shape((self.data, self.ring, self.ulysses), self.pipeline, self.box)

    @property
    def settings(self) -> dict[str, object]:
        """{"section.key": value}"""
        shared = self.ring * self.ulysses > 1
        boxes = {"pipeline.boxes": ["x".join(map(str, box)) for box in self.boxes]} if self.boxes else {}
        return boxes | {
            "grid.data": [self.data, self.ring, self.ulysses] if shared else self.data,
            "grid.sequence": 1,
            "grid.expert": self.expert,
            "grid.expert_tensor": self.expert_tensor,
            "grid.pipeline": self.pipeline,
            "grid.tensor": list(self.box),
            "train.microbatches": self.microbatches,
            "pipeline.schedule": self.schedule,
            "pipeline.virtual_stages": self.virtual_stages,
            "pipeline.partition": list(self.partition) or "even",
            "train.recompute": self.recompute,
            "data_parallel.method": self.method,
            "tensor.algorithm": self.algorithm,
        }


@dataclass(frozen=True)
class Job:
    """The part of a configuration that no choice changes.

    Attributes:
        costs: sizes of the layers.
        heads, groups: attention heads, and those of keys: a group of heads stays on one rank.
        itemsize: bytes of weights and activations; reduce, comm: of gradients, kept and sent; master: of the weights
            that the optimizer updates; moments: numbers that it keeps of each besides; ema: bytes of its average.
        background: whether checkpoints are written from copies in host memory.
        clips: whether gradients have a largest norm.
        overlap: as tensor.overlap.
        slices: token slices of a sequence.
        shares_sequences: whether ring and Ulysses ranks can share a sequence.
        averaged: of local SGD, the numbers of each parameter that replicas average in a step, as a mean over many
            steps; else 1.
        servers, staleness: of a parameter server; else 0.
    """

    costs: TransformerCosts
    heads: int
    groups: int
    batch: int
    itemsize: int
    reduce: int
    comm: int
    master: int
    moments: int
    ema: int
    background: bool
    clips: bool
    compute: str
    matmul: str
    overlap: tuple[str, ...]
    slices: tuple[int, ...]
    shares_sequences: bool
    averaged: float
    servers: int
    staleness: int

    @property
    def flops(self) -> float:
        """Floating-point operations of a step; see `TransformerCosts.flops_per_token`."""
        return self.batch * self.costs.context * self.costs.flops_per_token

    @property
    def mixed(self) -> bool:
        """Whether weights, masters and gradients are of several types."""
        return len({self.itemsize, self.master, self.reduce, self.comm}) > 1

    @property
    def experts(self) -> int:
        """Of a layer; 1 where there is none."""
        return self.costs.mixture.experts if self.costs.mixture else 1

    def sequences(self, choice: Choice) -> int:
        """Of a microbatch, on the rank that has the most."""
        return -(-self.batch // ((choice.data - self.servers) * choice.microbatches))


def read(config: Config) -> tuple[Job, Choice]:
    """The job and the choice that a configuration states.

    Raises:
        ValueError: for a model whose costs no formula tells.
    """
    spec = models.get(config.model.kind)
    precision, pipeline, train = config.precision, config.pipeline, config.train
    itemsize = BYTES[precision.compute]
    wide = max(itemsize, 4)
    reduce = wide if precision.reduce == "fp32" else itemsize
    moments = MOMENTS[train.optimizer]
    if train.optimizer in ("sgd", "rmsprop") and not train.momentum:
        moments -= 1
    job = Job(
        costs=spec.costs(spec.shape(vars(config.model))),
        heads=config.model.heads,
        groups=config.model.kv_heads or config.model.heads,
        batch=train.batch,
        itemsize=itemsize,
        reduce=reduce,
        comm=2 if precision.comm_dtype == "bf16" else reduce,
        master=wide if precision.master == "fp32" else itemsize,
        moments=moments,
        ema=wide if train.ema_decay else 0,
        background=config.checkpoint.background and bool(config.run.checkpoint_every or config.run.checkpoint_minutes),
        clips=train.clip > 0,
        compute=precision.compute,
        matmul=precision.matmul,
        overlap=tuple(config.tensor.overlap),
        slices=(slices := tuple(token_slices(config))),
        shares_sequences=spec.sequence_axes and not slices and config.data_parallel.method != "parameter_server",
        averaged=_averaged(config.data_parallel, moments + (train.ema_decay > 0)),
        servers=config.data_parallel.idle,
        staleness=config.data_parallel.staleness if config.data_parallel.idle else 0,
    )
    grid = config.grid_shape
    choice = Choice(
        grid["replica"], grid["pipeline"], grid["x"], grid["y"], grid["z"], train.microbatches, pipeline.schedule,
        pipeline.virtual_stages, train.recompute, config.data_parallel.method, config.tensor.algorithm,
        grid["ring"], grid["ulysses"], config.grid.expert, config.grid.expert_tensor,
        () if isinstance(pipeline.partition, str) else tuple(pipeline.partition), config.boxes or (),
    )  # fmt: skip
    return job, choice


def _averaged(options: DataParallelConfig, states: int) -> float:
    """Of local SGD with an optimizer that keeps so many numbers of a parameter; see `Job`."""
    if options.method != "local_sgd":
        return 1.0
    return (1 + options.average_state * states) / options.average_every if options.average_every else 0.0


def check_one_box(config: Config, what: str) -> None:
    """Raise ValueError for stages with boxes of their own."""
    if config.boxes:
        raise ValueError(
            f"{what} is of the box grid.tensor on every stage, got pipeline.boxes = {config.pipeline.boxes}; leave it "
            "out, or look at hpctrain plan CONFIG --show boxes"
        )
