"""The choices that a search has."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator

from hpctrain.choices import PLANE_PRODUCTS, PRODUCTS, RECOMPUTE, check_product
from hpctrain.grid_shape import all_grids
from hpctrain.models import TransformerCosts
from hpctrain.pipeline import Schedule
from hpctrain.pipeline import schedule as schedule_of
from hpctrain.pipeline.synchronous import LARGEST
from hpctrain.plan.job import Choice, Job
from hpctrain.shard import split_sizes

ZERO = ("ddp", "zero1", "zero2", "zero3")
# GPipe takes as long as 1F1B and more memory: it is tried where it is given, or routers want all forwards first
SYNCHRONOUS = ("1f1b", "interleaved", "zb-h1", "zb-v")
# What of a choice a setting decides, where it is to be kept.
FIELDS = {
    "grid.data": ("data", "ring", "ulysses"),
    "grid.expert": ("expert",),
    "grid.pipeline": ("pipeline",),
    "grid.tensor": ("x", "y", "z"),
    "train.microbatches": ("microbatches",),
    "train.recompute": ("recompute",),
    "pipeline.schedule": ("schedule", "virtual_stages"),
    "pipeline.partition": ("partition",),
    "data_parallel.method": ("method",),
    "tensor.algorithm": ("algorithm",),
}


def grids(job: Job, given: Choice, ranks: int) -> Iterator[Choice]:
    """Every grid of `ranks` that leaves no replica without a sequence, no stage without a layer and no rank of a
    sequence without tokens and heads, and on which ranks can train as is asked for, with every product that it allows;
    all of them with a single microbatch, whose other settings are the simplest."""
    alone = given.schedule == "ampnet"  # on each stage; and workers of servers with staleness, on all stages
    for (data, ring, ulysses), pipeline, (x, y, z) in all_grids(ranks, sequence=True):
        if ring * ulysses > 1 and not job.shares_sequences:
            continue
        workers = data - job.servers
        if workers < 1 or workers > job.batch or not _has_stages(job, given, pipeline):
            continue
        if (alone and pipeline < ranks) or (job.staleness and data < ranks):
            continue
        if data * ring * ulysses * x * y * z % given.expert_tensor:
            continue
        if 2 * ring * ulysses > max(2, job.costs.context):
            continue
        for algorithm in products(given.algorithm, x, y, z):
            columns = y if algorithm in PLANE_PRODUCTS else x * y
            if ulysses == 1 or ulysses * columns <= job.heads:
                yield given._replace(
                    data=data, ring=ring, ulysses=ulysses, pipeline=pipeline, x=x, y=y, z=z, microbatches=1,
                    schedule="1f1b", virtual_stages=0, recompute="none", method="ddp", algorithm=algorithm, expert=1,
                    partition=(),
                )  # fmt: skip


def products(given: str, x: int, y: int, z: int) -> list[str]:
    """Names of those that a box allows; of two that are the same there the one that is given, or else the first.

    >>> products("agarwal", 1, 1, 1), products("megatron", 2, 1, 1), products("agarwal", 2, 2, 2)
    (['agarwal'], ['megatron', 'summa'], ['agarwal', 'two_half_d'])
    """
    if x == y == z == 1:
        return [given]
    allowed = [name for name in PRODUCTS if _allowed(name, x, y, z)]
    same = {"agarwal", "megatron"}, {"cannon", "two_half_d"} if z == 1 else set()
    for names in same:
        twins = [name for name in allowed if name in names]
        kept = given if given in twins else twins[0] if twins else ""
        allowed = [name for name in allowed if name not in names or name == kept]
    return allowed


def layouts(job: Job, grid: Choice) -> Iterator[Choice]:
    """A grid with every number of microbatches that cuts a replica's sequences evenly."""
    for microbatches in divisors(-(-job.batch // (grid.data - job.servers))):
        yield grid._replace(microbatches=microbatches)


def ways(job: Job, given: Choice, layout: Choice) -> Iterator[Choice]:
    """A layout with every way to keep replicas that trains as one rank does, and every spread of experts. Whoever asks
    for another one, as local SGD, or for a schedule that delays updates, keeps it."""
    methods = ZERO if given.method in ZERO and not _delayed(given) else (given.method,)
    if layout.replicas == 1 and given.method in ZERO:
        methods = ("ddp",)
    for method, expert in itertools.product(methods, expert_ranks(job, given, layout)):
        yield layout._replace(method=method, expert=expert)


def choices(job: Job, given: Choice, way: Choice) -> Iterator[Choice]:
    """Every schedule with its cuts, and recomputation (the least first), of those that train as one rank does. Whoever
    asks for another one, as PipeDream, keeps it; so does who lists the layers of each stage."""
    searched, mixture = _searched(given), job.costs.mixture
    by_step = mixture is not None and mixture.step_balanced
    orders = schedules(job.costs.layers, way.pipeline) if searched else [(given.schedule, given.virtual_stages)]
    if searched and (given.schedule == "gpipe" or by_step):
        orders.append(("gpipe", 0))
    for schedule, virtual_stages in orders:
        if by_step and not _forwards_first(schedule, way.pipeline, min(2, way.microbatches), virtual_stages):
            continue
        if way.pipeline * max(1, virtual_stages) * way.microbatches > LARGEST:
            continue
        stages = way.pipeline * (2 if schedule == "zb-v" else max(1, virtual_stages))
        cuts = partitions(job.costs, stages) if searched else [given.partition]
        for partition, recompute in itertools.product(cuts, recomputations(job, given)):
            yield way._replace(
                schedule=schedule, virtual_stages=virtual_stages, partition=partition, recompute=recompute
            )


def recomputations(job: Job, given: Choice) -> tuple[str, ...]:
    """The least first."""
    if job.slices:
        return (given.recompute,)
    return tuple(each for each in RECOMPUTE if each != "block") if _delayed(given) else RECOMPUTE


def kept(choice: Choice, given: Choice, settings: tuple[str, ...]) -> bool:
    """Whether these settings are as they were given.

    Raises:
        ValueError: for a setting that no search changes.
    """
    for name in settings:
        if name not in FIELDS:
            raise ValueError(f"--keep takes settings that a search changes: {', '.join(FIELDS)}; got {name}")
    return all(getattr(choice, field) == getattr(given, field) for name in settings for field in FIELDS[name])


def expert_ranks(job: Job, given: Choice, layout: Choice) -> list[int]:
    """Numbers of ranks that experts can be spread over so that none is without one, or without its part of one."""
    spread = given.method in ZERO
    parts = given.expert_tensor
    ranks = divisors(layout.replicas * math.prod(layout.box)) if parts * job.experts > 1 else [1]
    return [n for n in ranks if n <= parts * job.experts and n % parts == 0 and (spread or n == 1)]


def schedules(layers: int, ranks: int) -> list[tuple[str, int]]:
    """(name, virtual stages) of those that this pipeline can have.

    >>> schedules(8, 1), schedules(8, 2)
    ([('1f1b', 0)], [('1f1b', 0), ('interleaved', 2), ('interleaved', 4), ('zb-h1', 0), ('zb-v', 0)])
    """
    if ranks == 1:
        return [("1f1b", 0)]
    virtual = [v for v in divisors(layers // ranks) if v > 1] if layers % ranks == 0 else []
    found = [("1f1b", 0), *(("interleaved", v) for v in virtual), ("zb-h1", 0)]
    return found + [("zb-v", 0)] * (2 * ranks <= layers)


def partitions(costs: TransformerCosts, stages: int) -> list[tuple[int, ...]]:
    """The even cut, (), and the one that counts the projection onto the vocabulary as the layers that take as many
    floating-point operations, where that is another.

    >>> from hpctrain.models import get
    >>> sizes = {"layers": 8, "width": 64, "heads": 4, "context": 64, "vocabulary": 1500, "dropout": 0.0, "tied": False}
    >>> costs = get("gpt2").costs(get("gpt2").shape(sizes))
    >>> partitions(costs, 2), partitions(costs, 1), partitions(costs, 4)
    ([(), (5, 3)], [()], [(), (3, 2, 2, 1)])
    """
    block = costs.block_weights(active=True) + 2 * costs.attention_width * costs.keys
    head = costs.vocabulary * costs.width / block
    last = max(1, round((costs.layers + head) / stages - head))
    if stages == 1 or costs.layers - last < stages - 1:
        return [()]
    cut = *split_sizes(costs.layers - last, stages - 1), last
    return [(), cut] if cut != tuple(split_sizes(costs.layers, stages)) else [()]


def divisors(number: int) -> list[int]:
    """
    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _searched(given: Choice) -> bool:
    return given.schedule in ("gpipe", *SYNCHRONOUS) and not given.partition


def _has_stages(job: Job, given: Choice, pipeline: int) -> bool:
    """Whether so many ranks can have layers; where the schedule is not searched, as many stages as it has with them."""
    if pipeline > job.costs.layers:
        return False
    if _searched(given):
        return True
    try:
        made = _schedule(given.schedule, pipeline, 1, given.virtual_stages, len(job.slices))
    except ValueError:  # as of an odd number of ranks, for schedules that pair them
        return False
    stages = made.graph.stages
    return stages <= job.costs.layers and len(given.partition) in (0, stages)


def _delayed(given: Choice) -> bool:
    return not _searched(given) and _schedule(given.schedule, 2, 1, given.virtual_stages).delayed


def _forwards_first(name: str, pipeline: int, microbatches: int, virtual_stages: int) -> bool:
    return _schedule(name, pipeline, microbatches, virtual_stages).forwards_first


@functools.lru_cache(1 << 10)
def _schedule(name: str, ranks: int, microbatches: int, virtual_stages: int, slices: int = 0) -> Schedule:
    return schedule_of(name, ranks, microbatches, virtual_stages or None, slices or None)


def _allowed(algorithm: str, x: int, y: int, z: int) -> bool:
    try:
        check_product(algorithm, x, y, z)
    except ValueError:
        return False
    return True
