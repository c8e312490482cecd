"""Bytes that one training step moves, by formula."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.algorithms import DEFAULT_OVERLAP
from hpctrain.models.gpt2 import GPT2Shape
from hpctrain.shard import split_sizes


def step_traffic(
    shape: GPT2Shape,
    grid: dict[str, int],
    batch: int,
    microbatches: int,
    itemsize: int = 4,
    stage: int = 0,
    algorithm: str = "agarwal",
    overlap: Sequence[str] = DEFAULT_OVERLAP,
) -> dict[str, float]:
    """Bytes that a rank of pipeline stage `stage` receives in one training step of a GPT-2, {axis: bytes}.

    Exact where the sizes divide evenly over the grid; then it is also what the rank sends, but for the ends of the
    pipeline. Every gather, scatter and sum over p ranks counts (p-1)/p of what it gathers, scatters or (twice) sums.

    Source: the volumes of Agarwal's product, mk/(pm pk) (1 - 1/pn) + kn/(pk pn) (1 - 1/pm) + mn/(pm pn) (1 - 1/pk)
    words a rank; here the backward products gather again what was not kept. Those of the others are in `matmul`.

    Args:
        shape: sizes of the model.
        grid: sizes of the axes data, pipeline, x, y and z.
        batch: sequences of the global batch.
        microbatches: of a replica's part of it.
        itemsize: bytes of a number.
        algorithm: the matrix product of the layers.
        overlap: as in `layers.algorithm_of`.
    """
    plane = algorithm in ("cannon", "summa", "two_half_d")
    d, p, x, y, z = (grid[axis] for axis in ("data", "pipeline", "x", "y", "z"))
    first, last = stage == 0, stage == p - 1
    layers = split_sizes(shape.layers, p)[stage]
    width, vocabulary = shape.width, shape.vocabulary
    rows = batch / (d * microbatches) / z * shape.context  # of a z block, in one microbatch

    # of how many microbatches the gradients of weights are summed over z together
    summed_once = microbatches if "weight_gradient" in overlap else 1

    def part(size):
        """What an axis of this size leaves to be received."""
        return (size - 1) / size

    def linear(n_in, n_out, to_inner):
        if plane:  # three products of the same volume, in each of which the output features are cut over x and y
            outputs = rows * n_out * (part(y) + part(z) / y) / x
            return 3 * (outputs + n_out * n_in * part(x) / (y * z) + rows * n_in * (z - 1) / (x * y))
        over_in, over_out = (y, x) if to_inner else (x, y)
        # the input is spread over the axis of the output's block and gathered along it, and the other way round
        gather_in = part(over_out) * rows * n_in / over_in
        gather_out = part(over_in) * rows * n_out / over_out
        weight = part(z) * n_in * n_out / (x * y)
        forward = gather_in + weight + gather_out
        # the output's gradient, the weight again, the input's gradient, the input again, the weight's gradient
        return forward + gather_out + weight + gather_in + gather_in + weight / summed_once

    norm = part(y) * y * 2 * rows / x + 2 * part(y) * 2 * rows / x  # statistics gathered, then sums reduced
    block = (
        2 * norm
        + linear(width, 3 * width, True)
        + linear(width, width, False)
        + linear(width, 4 * width, True)
        + linear(4 * width, width, False)
    )
    tables = (vocabulary + shape.context) * width / (x * y)
    embedding = 2 * part(x) * rows * width / y + 2 * part(z) * tables
    loss = (y - 1) * 2 * rows / x if plane else (x * y - 1) * 2 * rows
    head = norm + linear(width, vocabulary, True) + loss
    tensor = microbatches * (layers * block + first * embedding + last * head)

    # Gradients of vectors, summed over the tensor axes along which they are repeated, then everything over data.
    norms = 2 * (2 * layers + last) * width / y
    biases_inner = 0 if plane else layers * 7 * width / (x * y)
    biases_residual = layers * (9 if plane else 2) * width / y
    tensor += 2 * part(x * z) * (norms + biases_residual) + 2 * part(z) * biases_inner
    weights = (layers * 12 * width * width) / (x * y * z)
    table = vocabulary * width / (x * y * z)
    if first:
        weights += table + shape.context * width / (x * y * z)
    if last and not (first and shape.tied):
        weights += table
    data = 2 * part(d) * (weights + norms + biases_inner + biases_residual)

    activation = rows / x * width / y
    pipeline = microbatches * activation * ((not first) + (not last))
    if shape.tied and first != last:
        pipeline += table

    scalars = 8  # the loss and the squared norm travel as float64
    return {
        "data": itemsize * data + 2 * part(d) * scalars,
        "pipeline": itemsize * pipeline + 2 * part(p) * 2 * scalars,
        "tensor": itemsize * tensor + 2 * part(x * y * z) * 2 * scalars,
    }
