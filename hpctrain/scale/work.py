"""What a training step costs by formula: floating-point operations, bytes, and the fewest bytes it could do with."""

from __future__ import annotations

from math import prod

from hpctrain.config import Config
from hpctrain.config_checks import check_pipeline, token_slices
from hpctrain.matmul import lower_bound
from hpctrain.models.gpt2 import GPT2Shape
from hpctrain.plan import step_traffic
from hpctrain.shard import split_sizes

ITEMSIZE = {"fp64": 8}  # bytes of a number on the wire; else 4


def flops(config: Config) -> float:
    """Floating-point operations of a step of the model: forward, and twice that backward.

    Source: Chowdhery et al., "PaLM" (2022), appendix B: 6 a weight and token, and 12 × layers × width × context a token
    for attention, where the mask is not taken off; the embeddings multiply nothing.
    """
    m = config.model
    weights = 12 * m.layers * m.width**2 + m.vocabulary * m.width
    return config.train.batch * m.context * (6.0 * weights + 12.0 * m.layers * m.width * m.context)


def has_formula(config: Config) -> bool:
    """Whether `received` is exact where sizes divide: gradients are summed over replicas, and all cuts are even."""
    return config.replicas.method == "ddp" and config.pipeline.partition == "even" and not token_slices(config)


def received(config: Config, rank: int) -> dict[str, float]:
    """Bytes that rank `rank` of the pipeline axis receives in a step, {axis: bytes}, by `step_traffic`."""
    m, tensor = config.model, config.tensor
    shape = GPT2Shape(m.layers, m.width, m.heads, m.context, m.vocabulary, m.dropout, m.tied)
    itemsize = ITEMSIZE.get(config.precision.compute, 4)
    return step_traffic(
        shape, config.grid_shape, config.train.batch, check_pipeline(config), itemsize, rank, tensor.algorithm,
        tensor.overlap,
    )  # fmt: skip


def bound(config: Config, rank: int) -> dict[str, float]:
    """The same, of which less cannot be had: the matrix products at their lower bounds; the sums over data and the
    messages between stages are at theirs by themselves."""
    m, grid, schedule = config.model, config.grid_shape, check_pipeline(config)
    box = grid["x"] * grid["y"] * grid["z"]
    rows = max(1, config.train.batch * m.context // (grid["data"] * schedule.microbatches))
    stages = schedule.graph.stages
    held = [stage for (_, stage), home in schedule.placement.items() if home == rank]
    layers = sum(split_sizes(m.layers, stages)[stage] for stage in held)
    shapes = [
        (3 * m.width, layers),
        (m.width, layers),
        (4 * m.width, 2 * layers),
        (m.vocabulary, held.count(stages - 1)),
    ]
    # forward moves the input, the weight and the output; backward, where what arrived is kept, their gradients
    words = sum(2 * count * lower_bound(rows, m.width, n, box) for n, count in shapes)
    copies = len({copy for copy, _ in schedule.placement})  # of the model, on one pipeline: they share the microbatches
    itemsize = ITEMSIZE.get(config.precision.compute, 4)
    return {**received(config, rank), "tensor": itemsize * schedule.microbatches * words / copies}


def predicted_seconds(config: Config, machine: dict | None) -> float:
    """Seconds of a step of the slowest stage by the machine's figures; without them the bytes that it receives."""
    stages = config.grid_shape["pipeline"]
    most = max(sum(received(config, rank).values()) for rank in range(stages))
    if machine is None:
        return most
    computing = flops(config) / prod(config.grid_shape.values()) / (machine["gemm"]["gflops_per_rank"] * 1e9)
    bubble = (stages - 1) / config.train.microbatches
    return computing * (1 + bubble) + most / (machine["mpi"]["bandwidth_gib_per_second"] * 2**30)
