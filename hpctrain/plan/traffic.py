"""Bytes that one training step moves, by formula."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from hpctrain.choices import DEFAULT_OVERLAP, PLANE_PRODUCTS
from hpctrain.grid_shape import size_of
from hpctrain.models import TransformerCosts
from hpctrain.pipeline import Schedule, one_f_one_b
from hpctrain.pipeline.actions import FORWARD, WEIGHT_GRADIENT, flat
from hpctrain.plan.pipelines import messages
from hpctrain.shard import split_sizes


def step_traffic(
    model: TransformerCosts,
    grid: dict[str, int],
    batch: int,
    schedule: Schedule | int,
    itemsize: int = 4,
    rank: int = 0,
    algorithm: str = "agarwal",
    overlap: Sequence[str] = DEFAULT_OVERLAP,
    layers_per_stage: Sequence[int] | None = None,
    method: str = "ddp",
    expert: int = 1,
    reduce: int | None = None,
    comm: int | None = None,
    expert_tensor: int = 1,
    averaged: float = 1.0,
    servers: int = 0,
    serves: bool = False,
    staleness: int = 0,
    recompute: str = "none",
) -> dict[str, float]:
    """Bytes that rank `rank` of the pipeline axis receives in one training step, {axis: bytes}.

    Exact where the sizes divide evenly over the grid; then it is also what the rank sends, but for the ends of the
    pipeline. Every gather, scatter and sum over p ranks counts (p-1)/p of what it gathers, scatters or (twice) sums.

    Source: the volumes of Agarwal's product, mk/(pm pk) (1 - 1/pn) + kn/(pk pn) (1 - 1/pm) + mn/(pm pn) (1 - 1/pk)
    elements a rank; here the backward products gather again what was not kept. Those of the others are in `matmul`.

    Args:
        model: `ModelSpec.costs` of its shape.
        grid: sizes of the axes, as of `Grid.shape`.
        batch: sequences of the global batch.
        schedule: of the pipeline; a number means 1F1B of so many microbatches.
        itemsize: bytes of a number, of weights and activations; statistics of norms and of the loss have 4 at least.
        algorithm: the matrix product of the layers.
        overlap: as in `layers.algorithm_of`.
        layers_per_stage: blocks of each stage, by default as equal as can be.
        method: of `data_parallel`. To "zero3", where weights travel by messages, come 8 bytes from each other replica
            before each layer's forward and backward, and once a step.
        expert: ranks that experts are spread over. Of these the load is taken to be even, and all to be on one node.
        reduce, comm: bytes of a number of gradients, as they are summed over microbatches, and over the data axis;
            those of the line above where they are not given.
        expert_tensor: ranks, of `expert`, that divide each expert.
        averaged: of "local_sgd": numbers of each parameter that replicas average in a step, as a mean over many steps.
        servers, staleness: of "parameter_server"; with a staleness, a mean over many steps.
        serves: whether the rank is one of the servers, else a worker.
        recompute: what backward computes once more, with all that its forward received.
    """
    reduce = reduce or itemsize
    comm, wide = comm or reduce, max(4, itemsize)
    plane = algorithm in PLANE_PRODUCTS
    d, p, x, y, z = (size_of(grid, axis) for axis in ("data", "pipeline", "x", "y", "z"))
    if isinstance(schedule, int):
        schedule = one_f_one_b(p, schedule)
    stages, slices = schedule.graph.stages, schedule.slices
    blocks = split_sizes(model.layers, stages) if layers_per_stage is None else layers_per_stage
    width, vocabulary = model.width, model.vocabulary
    workers = d - servers
    # of a z block, in one forward
    rows = 0.0 if serves else batch / (workers * schedule.microbatches * slices) / z * model.context
    work = [(a.kind, a.stage) for a in flat(schedule.order[rank])]
    local_stages = sorted({stage for (_, stage), home in schedule.placement.items() if home == rank})
    first, last = 0 in local_stages, stages - 1 in local_stages
    # how often a step sums gradients over ranks, and gathers the weights
    updates, passes = len(schedule.updates), {stage: work.count((FORWARD, stage)) for stage in local_stages}
    most = max(passes.values())  # where microbatches go both ways, one of the stages may have more than another
    sums = most if method in ("zero2", "zero3") else updates
    gathers = 2 * most if method == "zero3" else updates

    def part(size):
        """What an axis of this size leaves to be received."""
        return (size - 1) / size

    def operands(n_in, n_out, to_inner):
        """Of a forward: input, weight and output."""
        if plane:  # the output features are cut over x and y
            outputs = rows * n_out * (part(y) + part(z) / y) / x
            return rows * n_in * (z - 1) / (x * y), n_out * n_in * part(x) / (y * z), outputs
        over_in, over_out = (y, x) if to_inner else (x, y)
        # the input is spread over the axis of the output's block and gathered along it, and the other way round
        gather_in = part(over_out) * rows * n_in / over_in
        gather_out = part(over_in) * rows * n_out / over_out
        return gather_in, part(z) * n_in * n_out / (x * y), gather_out

    def linear(n_in, n_out, to_inner, split, summed_once):
        """Of a forward and a backward, a part `split` of which computes the weight's gradient later; that is summed
        over z for `summed_once` of them together."""
        gather_in, weight, gather_out = operands(n_in, n_out, to_inner)
        forward = gather_in + weight + gather_out
        if plane:  # three products of the same volume
            return 3 * forward
        # the output's gradient, the weight again, the input's gradient, the input again, the weight's gradient
        # a late weight gradient gathers the output's gradient once more
        return forward + (1 + split) * gather_out + weight + gather_in + gather_in + weight / summed_once

    blocks_again, attention_again = recompute == "block", recompute != "none"
    if model.rms_norm:  # a number a row is summed, forward and backward
        norm_forward = norm_backward = 2 * part(y) * rows / x
    else:  # two numbers a row are gathered forward, and summed backward
        norm_forward, norm_backward = part(y) * y * 2 * rows / x, 2 * part(y) * 2 * rows / x
    tables = (vocabulary + model.positions) * width / (x * y)
    embedding = 2 * part(x) * rows * width / y + 2 * part(z) * tables
    loss = (y - 1) * 2 * rows / x if plane else (x * y - 1) * 2 * rows
    attention = rows / x if plane else rows, grid["ring"], grid["ulysses"], y if plane else x * y
    ring, ulysses = model.sequence_elements(*attention)  # a ring's sums of gradients are wide, a third of what it moves
    exchanged = ring * (2 * itemsize + wide) / 3 + ulysses * itemsize
    exchanged += attention_again * itemsize * (ring / 3 + ulysses / 2)
    sequence = sum(passes[stage] * blocks[stage] for stage in local_stages) * exchanged
    mixture = model.mixture
    dense = [min(count, max(0, model.dense_layers - start)) for count, start in zip(blocks, accumulate([0, *blocks]))]
    mixed = sum(blocks[stage] - dense[stage] for stage in local_stages) if mixture else 0
    mixed_passes = sum(passes[stage] * (blocks[stage] - dense[stage]) for stage in local_stages) if mixture else 0
    tensor, statistics = 0.0, 0.0
    for stage, runs in passes.items():
        if not runs:
            continue
        once = runs if "weight_gradient" in overlap and sums == 1 and reduce == itemsize else 1
        how = work.count((WEIGHT_GRADIENT, stage)) / runs, once
        for count, kind in ((blocks[stage] - dense[stage], False), (dense[stage], True)):
            sizes = [(each.n_in, each.n_out, each.to_inner) for each in model.linears_of(kind)]
            linears = sum(linear(*each, *how) + blocks_again * sum(operands(*each)) for each in sizes)
            tensor += runs * count * linears
            statistics += runs * count * model.norms * ((1 + blocks_again) * norm_forward + norm_backward)
        head = linear(width, vocabulary, True, *how)
        tensor += runs * ((stage == 0) * embedding + (stage == stages - 1) * head)
        statistics += runs * (stage == stages - 1) * (norm_forward + norm_backward + loss)

    # Gradients of vectors, summed over the tensor axes along which they are repeated, then everything over data.
    layers = sum(blocks[stage] for stage in local_stages)
    norms = (1 if model.rms_norm else 2) * (model.norms * layers + last) * width / y
    inner, residual = (
        sum(each.n_out for each in model.linears if each.bias and each.to_inner == to_inner)
        for to_inner in (True, False)
    )
    biases_inner = 0 if plane else layers * inner / (x * y)
    biases_residual = layers * (inner + residual if plane else residual) / y
    head_norms = layers * model.head_norm_elements
    vectors = sums * (2 * part(x * z) * (norms + biases_residual) + 2 * part(z) * biases_inner)
    vectors += sums * 2 * part(x * y * z) * head_norms
    # every tensor rank has the whole router, and all experts where these are not spread
    experts = mixed * (mixture.experts / expert if mixture else 0) * model.expert_weights
    whole = mixed * model.router_weights + (experts if expert == 1 else 0)
    vectors += sums * 2 * part(x * y * z) * whole
    without = sum(dense[stage] for stage in local_stages)
    weights = sum(
        count * each.n_in * each.n_out
        for count, kind in ((layers - without, False), (without, True))
        for each in model.linears_of(kind)
    ) / (x * y * z)
    table = vocabulary * width / (x * y * z)
    if first:
        weights += table + model.positions * width / (x * y * z)
    if last and not (first and model.tied):
        weights += table
    parameters = weights + norms + head_norms + biases_inner + biases_residual + whole
    each = sums * comm + gathers * (comm if method == "ddp" else itemsize)  # bytes of a parameter
    data = each * part(d) * parameters
    between = counted = of_step = 0.0
    # The loss and the squared norm travel as float64; three int64 precede each round of sums, or none.
    scalars, own = 8, 1 / servers if serves else 0.0  # of the weights, what this rank serves
    numbers_of_step = {"ddp": 1, "zero1": 2, "zero2": 2 + 3 * (most + 1), "zero3": 2 + 3 * (most + 1)}.get(method, 0)
    if method == "local_sgd":  # gradients are summed inside of a replica alone
        sequence += 2 * part(size_of(grid, "sequence")) * (sums * comm * parameters + scalars)
        data = 2 * part(grid["replica"]) * (averaged * itemsize * parameters + 2 * scalars)
    elif method == "parameter_server" and not staleness:
        data = comm * (d - 1) * own * parameters + itemsize * (1 - own) * parameters + 2 * part(d) * 2 * scalars
    elif method == "parameter_server" and serves:  # with a gradient comes the number of the worker's step
        data = workers * (comm * own * parameters + 8)
    elif method == "parameter_server":  # with the weights comes how stale gradients were
        data = itemsize * parameters + 8 * ((workers - 1) * (2 * staleness + 1) + 1)
    if mixture and mixed:
        if expert > 1:
            data += each * part(d * x * y * z / expert) * experts
        tokens = rows / (x * y)
        # rows become whole, and are spread again, which is not repeated, as backward needs nothing of it; a pair's row
        # comes to its expert, and back
        tensor += mixed_passes * (4 + blocks_again) * part(y) * tokens * width
        pairs = expert_tensor * mixture.top_k * tokens  # of a token and a part of an expert
        numbers = pairs / expert * (2 + blocks_again) * (2 * width * itemsize + max(4, itemsize))
        chosen = 8 + 4 * pairs  # how many tokens each rank has, and which experts
        between = mixed_passes * (expert - 1) * (numbers + chosen)
        if mixture.balanced:  # pairs of each sequence and expert, int64
            sequences = rows * size_of(grid, "sequence") / model.context
            counted = mixed_passes * 2 * 8 * sequences * mixture.experts
        elif mixture.step_balanced:
            of_step = mixed * 2 * 8 * mixture.experts

    # What other ranks hold too is received from each of them; activations and their gradients have one size.
    pipeline = messages(schedule, rank) * rows / x * width / y
    ends = [{home for (_, stage), home in schedule.placement.items() if stage == end} for end in (0, stages - 1)]
    if schedule.replicas > 1:
        shared = parameters
    elif model.tied and (first or last) and ends[0] != ends[1]:
        shared = table
    else:
        shared = 0
    tied = shared * {"ddp": 1, "local_sgd": 1, "parameter_server": own}.get(method, 1 / d)

    return {
        "data": data + 2 * part(d) * scalars * numbers_of_step + part(d * x * y * z / expert) * of_step,
        "sequence": sequence + part(size_of(grid, "sequence")) * counted,
        "expert": between + 2 * part(expert) * scalars + part(expert) * of_step,
        "pipeline": itemsize * pipeline + reduce * tied + 2 * part(p) * 2 * scalars,
        "tensor": itemsize * tensor
        + wide * statistics
        + reduce * vectors
        + part(x * y) * counted
        + 2 * part(x * y * z) * 2 * scalars,
    }
