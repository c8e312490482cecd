"""What a training step costs by formula: floating-point operations, bytes, and the fewest bytes it could do with."""

from __future__ import annotations

from hpctrain import models
from hpctrain.config import Config
from hpctrain.config.checks import pipeline_schedule, token_slices
from hpctrain.grid_shape import size_of
from hpctrain.matmul import lower_bound
from hpctrain.plan import step_traffic
from hpctrain.plan.job import read
from hpctrain.shard import split_sizes


def costs(config: Config) -> models.TransformerCosts:
    """Sizes of the model's layers."""
    spec = models.get(config.model.kind)
    return spec.costs(spec.shape(vars(config.model)))


def flops(config: Config) -> float:
    """Floating-point operations of a step of the model; see `TransformerCosts.flops_per_token`."""
    return config.train.batch * config.model.context * costs(config).flops_per_token


def has_formula(config: Config) -> bool:
    """Whether `received` is exact where sizes divide: gradients are summed over replicas, and all cuts are even."""
    plain = config.pipeline.partition == "even" and not config.boxes and not token_slices(config)
    return config.data_parallel.method == "ddp" and plain


def received(config: Config, rank: int) -> dict[str, float]:
    """Bytes that rank `rank` of the pipeline axis receives in a step, {axis: bytes}, by `step_traffic`."""
    tensor, (job, _) = config.tensor, read(config)
    return step_traffic(
        costs(config), config.grid_shape, config.train.batch, pipeline_schedule(config), job.itemsize, rank,
        tensor.algorithm, tensor.overlap, expert=config.grid.expert, reduce=job.reduce, comm=job.comm,
        expert_tensor=config.grid.expert_tensor, recompute=config.train.recompute,
    )  # fmt: skip


def bound(config: Config, rank: int) -> dict[str, float]:
    """The same, of which less cannot be had: the matrix products at their lower bounds; the sums over data and the
    messages between stages are at theirs by themselves."""
    model, grid, schedule = costs(config), config.grid_shape, pipeline_schedule(config)
    box = grid["x"] * grid["y"] * grid["z"]
    rows = max(1, config.train.batch * model.context // (size_of(grid, "data") * schedule.microbatches))
    stages = schedule.graph.stages
    own_stages = [stage for (_, stage), home in schedule.placement.items() if home == rank]
    layers = sum(split_sizes(model.layers, stages)[stage] for stage in own_stages)
    products = [(each.n_in, each.n_out, layers) for each in model.linears]
    products.append((model.width, model.vocabulary, own_stages.count(stages - 1)))
    # forward moves the input, the weight and the output; backward, where what arrived is kept, their gradients
    elements = sum(2 * count * lower_bound(rows, n_in, n_out, box) for n_in, n_out, count in products)
    copies = len({copy for copy, _ in schedule.placement})  # of the model, on one pipeline: they share the microbatches
    itemsize = read(config)[0].itemsize
    return {**received(config, rank), "tensor": itemsize * schedule.microbatches * elements / copies}
