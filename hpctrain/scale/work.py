"""What a training step costs by formula: floating-point operations, bytes, and the fewest bytes it could do with."""

from __future__ import annotations

from math import prod

from hpctrain.config import Config
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
    """Whether `received` is exact where sizes divide: gradients summed over replicas, stage s on rank s."""
    schedule, partition = config.pipeline.schedule, config.pipeline.partition
    return config.replicas.method == "ddp" and schedule in ("gpipe", "1f1b") and partition == "even"


def received(config: Config, stage: int) -> dict[str, float]:
    """Bytes that a rank of the stage receives in a step, {axis: bytes}, by `step_traffic`."""
    m, train = config.model, config.train
    shape = GPT2Shape(m.layers, m.width, m.heads, m.context, m.vocabulary, m.dropout, m.tied)
    itemsize = ITEMSIZE.get(config.precision.compute, 4)
    grid, tensor = config.grid_shape, config.tensor
    return step_traffic(shape, grid, train.batch, train.microbatches, itemsize, stage, tensor.algorithm, tensor.overlap)


def bound(config: Config, stage: int) -> dict[str, float]:
    """The same, of which less cannot be had: the matrix products at their lower bounds; the sums over data and the
    messages between stages are at theirs by themselves."""
    m, train, grid = config.model, config.train, config.grid_shape
    box = grid["x"] * grid["y"] * grid["z"]
    rows = max(1, train.batch * m.context // (grid["data"] * train.microbatches))
    layers = split_sizes(m.layers, grid["pipeline"])[stage]
    shapes = [(3 * m.width, layers), (m.width, layers), (4 * m.width, 2 * layers)]
    if stage == grid["pipeline"] - 1:
        shapes.append((m.vocabulary, 1))
    # forward moves the input, the weight and the output; backward, where what arrived is kept, their gradients
    words = sum(2 * count * lower_bound(rows, m.width, n, box) for n, count in shapes)
    itemsize = ITEMSIZE.get(config.precision.compute, 4)
    return {**received(config, stage), "tensor": itemsize * train.microbatches * words}


def predicted_seconds(config: Config, machine: dict | None) -> float:
    """Seconds of a step of the slowest stage by the machine's figures; without them the bytes that it receives."""
    stages = config.grid_shape["pipeline"]
    most = max(sum(received(config, stage).values()) for stage in range(stages))
    if machine is None:
        return most
    computing = flops(config) / prod(config.grid_shape.values()) / (machine["gemm"]["gflops_per_rank"] * 1e9)
    bubble = (stages - 1) / config.train.microbatches
    return computing * (1 + bubble) + most / (machine["mpi"]["bandwidth_gib_per_second"] * 2**30)
