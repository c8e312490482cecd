"""What no run can use is refused here, before anything starts: values of a configuration, one by one and together."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpctrain.algorithms import ALL_REDUCE, RECOMPUTE, check_algorithm, check_optimizer, check_overlap
from hpctrain.grid import check_ranks
from hpctrain.pipeline import NAMES, Schedule, balanced_slices, schedule
from hpctrain.pipeline.partitioners import METHODS as PARTITIONS
from hpctrain.pipeline.partitioners import check_counts

if TYPE_CHECKING:
    from hpctrain.config import Config

METHODS = ("ddp", "zero1", "zero2", "zero3", "parameter_server", "local_sgd")  # of hpctrain.replicas
LARGEST_SCHEDULE = 2**20  # microbatches of all stages; a pipeline of 64 ranks with 1,024 has 2^16


def check(config: Config) -> None:
    """Raise ValueError for values that no run can use."""
    shape, run, model = config.grid_shape, config.run, config.model
    for name, low in {
        "run.steps": 1, "run.eval_every": 0, "run.eval_batches": 1, "run.sample": 0, "run.seed": 0, "model.layers": 1,
        "model.width": 1, "model.heads": 1, "model.context": 1, "model.vocabulary": 1, "train.batch": 1,
        "train.microbatches": 1, "train.lr": 0, "train.warmup": 0, "train.weight_decay": 0, "train.clip": 0,
        "replicas.average_every": 0, "replicas.servers": 1, "replicas.staleness": 0,
        "run.checkpoint_every": 0, "run.checkpoint_minutes": 0, "run.max_seconds": 0, "checkpoint.keep": 1,
        "sanity.spike_factor": 0, "sanity.limit": 0,
        "sanity.check_every": 0, "sanity.straggler": 0, "comm.watchdog": 0,
    }.items():  # fmt: skip
        section, key = name.split(".")
        if not (value := getattr(getattr(config, section), key)) >= low or value == math.inf:
            raise ValueError(f"{name} must be at least {low} and finite, got {value}")
    _one_of("run.device", run.device, ("auto", "cpu", "cuda"))
    _one_of("model.kind", model.kind, ("gpt2",))
    _one_of("replicas.method", config.replicas.method, METHODS)
    _one_of("precision.compute", config.precision.compute, ("fp32", "fp64", "bf16", "fp16"))
    _one_of("train.recompute", config.train.recompute, RECOMPUTE)
    _one_of("precision.master", config.precision.master, ("fp32", "compute"))
    _one_of("precision.reduce", config.precision.reduce, ("fp32", "compute"))
    _one_of("precision.wire", config.precision.wire, ("fp32", "bf16"))
    if not 0 < config.precision.loss_scale < math.inf:
        raise ValueError(f"precision.loss_scale must be above 0 and finite, got {config.precision.loss_scale}")
    _one_of("precision.matmul", config.precision.matmul, ("highest", "high", "medium"))
    _one_of("comm.all_reduce", config.comm.all_reduce, ALL_REDUCE)
    check_optimizer(config.train.optimizer)
    if not 0 <= config.train.momentum < 1:
        raise ValueError(f"train.momentum must be at least 0 and below 1, got {config.train.momentum}")
    _one_of("checkpoint.on_failure", config.checkpoint.on_failure, ("continue", "stop"))
    _one_of("sanity.nonfinite", config.sanity.nonfinite, ("stop", "skip", "rollback"))
    _one_of("sanity.spike", config.sanity.spike, ("stop", "skip", "rollback"))
    check_overlap(config.tensor.overlap)
    check_algorithm(config.tensor.algorithm, shape["x"], shape["y"], shape["z"])
    if not run.name or "/" in run.name or run.name in (".", ".."):
        raise ValueError(f"run.name must be a plain folder name, got {run.name!r}")
    if run.name == "data":
        raise ValueError(
            'run.name must not be "data", as packed text is kept in the folder data of run.out; choose another'
        )
    if model.width % model.heads:
        raise ValueError(f"model.width must be a multiple of model.heads = {model.heads}, got {model.width}")
    if not 0 <= model.dropout < 1:
        raise ValueError(f"model.dropout must be at least 0 and below 1, got {model.dropout}")
    if not 0 < config.data.validation < 1:
        raise ValueError(f"data.validation must lie between 0 and 1, got {config.data.validation}")
    check_pipeline(config)
    if not (config.data.path or config.data.text):
        config.data.text = ["python-stdlib"]


def token_slices(config: Config) -> list[int]:
    """Lengths of the token slices of every sequence, of equal floating-point operations; [] where they are whole."""
    slices, context, width = config.pipeline.slices, config.model.context, config.model.width
    if isinstance(slices, list):
        if min(slices, default=0) < 1 or sum(slices) != context:
            raise ValueError(f"pipeline.slices must be lengths that add up to model.context = {context}, got {slices}")
        return slices
    if config.pipeline.schedule != "terapipe" and slices < 2:
        return []
    # a block multiplies every token by 12 width² weights, and by the keys and values of every token before it
    return balanced_slices(context, slices or config.grid_shape["pipeline"], 12 * width**2, 2 * width)


def check_pipeline(config: Config) -> Schedule:
    """The schedule of the pipeline.

    Raises:
        ValueError: where the model, the schedule and the pipeline axis do not fit together.
    """
    pipeline, model, ranks = config.pipeline, config.model, config.grid_shape["pipeline"]
    _one_of("pipeline.schedule", pipeline.schedule, NAMES)
    if (size := ranks * max(1, pipeline.chunks) * config.train.microbatches) > LARGEST_SCHEDULE:
        raise ValueError(
            f"grid.pipeline × pipeline.chunks × train.microbatches must be at most {LARGEST_SCHEDULE}, as a schedule "
            f"lists all stages' microbatches, got {size}"
        )
    slices = len(token_slices(config)) or None
    made = schedule(pipeline.schedule, ranks, config.train.microbatches, pipeline.chunks or None, slices)
    stages, cut = made.graph.stages, pipeline.partition
    if model.layers < stages:
        raise ValueError(
            f"grid.pipeline = {ranks} with pipeline.schedule = {made.name} has {stages} stages, which need at least as "
            f"many layers, got model.layers = {model.layers}; use fewer stages or more layers"
        )
    if isinstance(cut, str):
        _one_of("pipeline.partition", cut, PARTITIONS)
    else:
        check_counts(cut, model.layers, stages)
    if config.train.recompute == "block" and (made.delayed or slices):
        raise ValueError(
            f"train.recompute=block computes a block once more with its newest weights and all keys, got "
            f"pipeline.schedule = {made.name}, which keeps older ones; use train.recompute=none"
        )
    if made.delayed and (config.train.clip or model.tied):
        raise ValueError(
            f"pipeline.schedule = {made.name} updates each stage by itself: it cannot clip the gradient of all, and "
            f"stages cannot share weights; use train.clip=0 and model.tied=false"
        )
    return made


def check_grid(config: Config, ranks: int) -> None:
    """Raise ValueError unless the grid has exactly `ranks` places."""
    check_ranks(config.grid_shape, ranks)


def _one_of(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be {' or '.join(json.dumps(k) for k in known)}, got {value!r}")
