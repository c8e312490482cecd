"""What several options together must fulfil for any run to use them."""

from __future__ import annotations

import math
from dataclasses import fields

from hpctrain import models
from hpctrain.choices import check_product
from hpctrain.config.option import options
from hpctrain.config.sections import Config
from hpctrain.grid_shape import TENSOR, check_expert, check_ranks, check_same_boxes, size_of, stage_holders
from hpctrain.pipeline import Schedule, balanced_slices, schedule
from hpctrain.pipeline.partitioners import check_counts
from hpctrain.pipeline.synchronous import LARGEST

FLOAT16_ZERO = 2.0**-25  # the largest number that float16 rounds to zero


def check(config: Config) -> None:
    """Raise ValueError for values that no run can use; changes nothing."""
    for field in fields(config):
        section = getattr(config, field.name)
        for key, option in options(section.__class__, field.name).items():
            option.validate(getattr(section, key))
    shape = config.grid_shape
    check_experts(config)
    check_sequence_axes(config)
    for box in config.boxes or [tuple(shape[axis] for axis in TENSOR)]:
        check_product(config.tensor.algorithm, *box)
    models.get(config.model.kind).shape(vars(config.model))
    placement = pipeline_schedule(config).placement
    if config.boxes:
        check_same_boxes(config.boxes, stage_holders(placement), config.model.tied)
    check_routing(config)
    check_data_parallel(config)
    check_documents(config)
    check_train(config)
    check_precision(config)
    if config.run.profile and config.run.profile[0] > config.run.steps:
        raise ValueError(f"run.profile = {config.run.profile} begins after run.steps = {config.run.steps}")
    if config.data.mixture and (config.data.path or config.data.text):
        raise ValueError("data.mixture takes the place of data.path and data.text; give one of them")


def check_train(config: Config) -> None:
    """Raise ValueError for options of the training that contradict each other, or the model."""
    train, kind = config.train, config.model.kind
    if not isinstance(train.min_lr, str) and train.min_lr > train.lr:
        raise ValueError(f"train.min_lr must be at most train.lr = {train.lr}, got {train.min_lr}")
    if train.ema_use and not train.ema_decay:
        raise ValueError(f"train.ema_use = {train.ema_use} needs a train.ema_decay above 0, such as 0.999")
    models.get(kind).check_recompute(train.recompute)
    if models.get(kind).own_loss and (train.label_smoothing or train.z_loss):
        raise ValueError(
            f"train.label_smoothing and train.z_loss are of hpctrain's cross entropy, but model.kind = {kind} has a "
            "loss of its own; return one that has them beside the model"
        )


def check_precision(config: Config) -> None:
    """Raise ValueError for an optimizer that would divide zero by zero. Those of Adam's fused kernel compute in
    float32."""
    precision, train = config.precision, config.train
    added = {
        "nadam": train.eps, "radam": train.eps, "adamax": train.eps, "adagrad": 1e-10, "rmsprop": 1e-8,
    }  # fmt: skip
    half = precision.compute == "fp16" and precision.master == "compute"
    if half and added.get(train.optimizer, 1.0) <= FLOAT16_ZERO:
        raise ValueError(
            f"precision.master = compute has train.optimizer = {train.optimizer} in float16, where the "
            f"{added[train.optimizer]} that it adds to what it divides by is zero; use precision.master=fp32, or "
            "adamw, adam or sgd"
        )


def check_data_parallel(config: Config) -> None:
    """Raise ValueError for a grid, or for a way with bad steps, that the method cannot work with."""
    options, shape = config.data_parallel, config.grid_shape
    if options.method != "parameter_server":
        return
    if options.servers >= shape["replica"]:
        raise ValueError(
            f"data_parallel.servers must leave a worker: at least 1 and below grid.data = {shape['replica']}, got "
            f"{options.servers}"
        )
    if options.staleness and math.prod(shape[axis] for axis in ("pipeline", "x", "y", "z")) > 1:
        raise ValueError(
            f"data_parallel.staleness = {options.staleness} lets every rank go its own way: it needs grid.pipeline = 1 "
            f"and grid.tensor = 1, got {shape['pipeline']} and {[shape[axis] for axis in 'xyz']}; use 0"
        )
    sanity = config.sanity
    if options.staleness and (sanity.nonfinite != "stop" or (sanity.spike_factor and sanity.spike == "skip")):
        raise ValueError(
            f"data_parallel.staleness = {options.staleness} updates weights by each worker's gradient at once: a step "
            f'cannot be skipped, and one that is not finite ends the job; use sanity.nonfinite = "stop" and '
            f'sanity.spike = "stop" or "rollback", got "{sanity.nonfinite}" and "{sanity.spike}"'
        )


def check_documents(config: Config) -> None:
    """Raise ValueError where documents of a sequence cannot be told apart."""
    if config.data.documents == "packed":
        return
    model, staleness = config.model.kind, config.data_parallel.staleness
    refused = {
        f"model.kind = {model}": not models.get(model).documents,
        "pipeline.schedule = terapipe": config.pipeline.schedule == "terapipe",
        f"data_parallel.staleness = {staleness}": staleness > 0,
    }
    for option, wrong in refused.items():
        if wrong:
            raise ValueError(
                f"data.documents = {config.data.documents} has documents attend to themselves alone, and all ranks "
                f"count the targets of a step together, which {option} does not; use data.documents=packed"
            )


def check_grid(config: Config, ranks: int) -> None:
    """Raise ValueError unless the grid has exactly `ranks` places."""
    check_ranks(config.grid_shape, ranks)


def check_experts(config: Config) -> None:
    """Raise ValueError for a grid that cannot spread experts as grid.expert says, or without any to spread."""
    check_expert(config.grid_shape, expert := config.grid.expert, config.grid.expert_tensor)
    if config.grid.expert_tensor > 1 and config.experts.replicate_hot:
        raise ValueError(
            f"experts.replicate_hot = {config.experts.replicate_hot} sends whole experts along, which "
            f"grid.expert_tensor = {config.grid.expert_tensor} divides; use 0, or grid.expert_tensor=1"
        )
    if expert > 1 and not models.get(config.model.kind).experts:
        raise ValueError(
            f"grid.expert = {expert} spreads the experts of a mixture, which model.kind = {config.model.kind} has not "
            "got; use grid.expert=1"
        )
    if expert > 1 and (method := config.data_parallel.method) in ("parameter_server", "local_sgd"):
        raise ValueError(
            f"data_parallel.method = {method} has all weights on every replica, got grid.expert = {expert}; use 1, or "
            "another method"
        )


def check_routing(config: Config) -> None:
    """Raise ValueError where what a router is to know of a sequence or of a step is not known in time."""
    if not models.get(config.model.kind).experts:
        return
    model, staleness = config.model, config.data_parallel.staleness
    sliced = bool(token_slices(config))
    for option in ("aux_loss", "capacity"):
        if sliced and getattr(model, option):
            raise ValueError(
                f"model.{option} = {getattr(model, option)} judges the experts of whole sequences, which token slices "
                f"({config.pipeline.schedule}) cut; use model.{option}=0, or another schedule"
            )
    if model.aux_loss and model.aux_scope == "step" and not pipeline_schedule(config).forwards_first:
        raise ValueError(
            f"model.aux_scope = step wants all forwards of a step before its first backward, which pipeline.schedule = "
            f"{config.pipeline.schedule} with train.microbatches = {config.train.microbatches} has not; use gpipe, or "
            "model.aux_scope=sequence"
        )
    if model.balance_bias and pipeline_schedule(config).delayed:
        raise ValueError(
            f"model.balance_bias = {model.balance_bias} changes after each step, by all its tokens, but "
            f"pipeline.schedule = {config.pipeline.schedule} updates weights on the way; use another schedule, or 0"
        )
    if staleness:
        raise ValueError(
            f"model.kind = {model.kind} adds up the load of its experts over all ranks after each step, but "
            f"data_parallel.staleness = {staleness} lets every rank go its own way; use 0"
        )


def check_sequence_axes(config: Config) -> None:
    """Raise ValueError where ranks share sequences that something else wants whole."""
    shape, model = config.grid_shape, config.model.kind
    if (shared := size_of(shape, "sequence")) == 1:
        return
    whole = {
        f"model.kind = {model}": not models.get(model).sequence_axes,
        "pipeline.schedule = terapipe": config.pipeline.schedule == "terapipe",
        "pipeline.slices": config.pipeline.slices not in (0, 1, []),
        "data_parallel.method = parameter_server": config.data_parallel.method == "parameter_server",
    }
    for option, refused in whole.items():
        if refused:
            raise ValueError(
                f"{option} needs whole sequences on each rank, got {shared} ranks that share each; use "
                f"grid.data = {size_of(shape, 'data')} and grid.sequence = 1"
            )


def token_slices(config: Config) -> list[int]:
    """Lengths of the token slices of every sequence, of equal floating-point operations; [] where they are whole."""
    slices, context = config.pipeline.slices, config.model.context
    if isinstance(slices, list):
        if min(slices, default=0) < 1 or sum(slices) != context:
            raise ValueError(f"pipeline.slices must be lengths that add up to model.context = {context}, got {slices}")
        return slices
    if config.pipeline.schedule != "terapipe" and slices < 2:
        return []
    spec = models.get(config.model.kind)
    costs = spec.costs(spec.shape(vars(config.model)))
    # a block multiplies every token by its weights, and by the keys and values of every token before it
    ranks = config.grid_shape["pipeline"]
    return balanced_slices(context, slices or ranks, costs.block_weights(active=True), 2 * costs.attention_width)


def pipeline_schedule(config: Config) -> Schedule:
    """The schedule of the pipeline.

    Raises:
        ValueError: where the model, the schedule and the pipeline axis do not fit together.
    """
    pipeline, model, ranks = config.pipeline, config.model, config.grid_shape["pipeline"]
    if (size := ranks * max(1, pipeline.virtual_stages) * config.train.microbatches) > LARGEST:
        raise ValueError(
            f"grid.pipeline × pipeline.virtual_stages × train.microbatches must be at most {LARGEST}, as a "
            f"schedule lists all stages' microbatches, got {size}"
        )
    if pipeline.schedule == "terapipe" and not models.get(model.kind).token_slices:
        raise ValueError(
            f"pipeline.schedule = terapipe cuts sequences into token slices, which model.kind = {model.kind} does not "
            "take; use another schedule"
        )
    slices = len(token_slices(config)) or None
    chosen = schedule(
        pipeline.schedule, ranks, config.train.microbatches, pipeline.virtual_stages or None, slices,
        **_asynchronous(config),
    )  # fmt: skip
    stages = chosen.graph.stages
    if model.layers < stages:
        raise ValueError(
            f"grid.pipeline = {ranks} with pipeline.schedule = {chosen.name} has {stages} stages, which need at least "
            f"as many layers, got model.layers = {model.layers}; use fewer stages or more layers"
        )
    if not isinstance(pipeline.partition, str):
        check_counts(pipeline.partition, model.layers, stages)
    if config.train.recompute == "block" and (chosen.delayed or slices):
        raise ValueError(
            f"train.recompute=block computes a block once more with its newest weights and all keys, got "
            f"pipeline.schedule = {chosen.name}, which keeps older ones; use train.recompute=none"
        )
    if chosen.delayed and (config.train.clip or model.tied):
        raise ValueError(
            f"pipeline.schedule = {chosen.name} updates each stage by itself: it cannot clip the gradient of all, and "
            f"stages cannot share weights; use train.clip=0 and model.tied=false"
        )
    if chosen.delayed and config.data_parallel.method != "ddp":
        raise ValueError(
            f"pipeline.schedule = {chosen.name} works with data_parallel.method=ddp, got {config.data_parallel.method}"
        )
    sequences = -(-config.train.batch // config.grid_shape["replica"])  # of the first replica, which has the most
    if chosen.delayed and any(min(update) >= sequences for update in chosen.updates):
        raise ValueError(
            f"pipeline.schedule = {chosen.name} updates weights on the way, and train.microbatches = "
            f"{config.train.microbatches} would make updates of no sequence of train.batch = {config.train.batch}; "
            f"use at most {sequences} microbatches"
        )
    skips = config.sanity.nonfinite == "skip" or (config.sanity.spike_factor and config.sanity.spike == "skip")
    if chosen.delayed and skips:
        raise ValueError(
            f'{chosen.name} updates weights before a step is over, which cannot be skipped; use "stop" or '
            '"rollback" for sanity.nonfinite and sanity.spike'
        )
    return chosen


def _asynchronous(config: Config) -> dict[str, int | bool | None]:
    """Options of a message driven pipeline."""
    pipeline, shape = config.pipeline, config.grid_shape
    options = {
        "max_active_keys": pipeline.max_active_keys or None,
        "min_update_frequency": pipeline.min_update_frequency,
        "staleness_correction": pipeline.staleness_correction,
    }
    if pipeline.schedule != "ampnet":
        unset = {"max_active_keys": None, "min_update_frequency": 1, "staleness_correction": False}
        if options != unset or pipeline.record or pipeline.replay:
            raise ValueError(
                "pipeline.max_active_keys, min_update_frequency, staleness_correction, record and replay are for "
                f"pipeline.schedule = ampnet, got {pipeline.schedule}; leave them out, or use ampnet"
            )
        return {}
    if others := {axis: size for axis, size in shape.items() if axis != "pipeline" and size > 1}:
        raise ValueError(
            f"pipeline.schedule = ampnet lets every rank go its own way, which ranks that sum gradients or share a "
            f"layer cannot: use grid.data = 1 and grid.tensor = 1, got {others}"
        )
    if config.data_parallel.method != "ddp":
        raise ValueError(
            f"pipeline.schedule = ampnet updates each stage by itself: use data_parallel.method = ddp, got "
            f"{config.data_parallel.method}"
        )
    return options
