"""The choices that a search has."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from hpctrain.choices import RECOMPUTE, check_product
from hpctrain.grid_shape import all_grids
from hpctrain.plan.job import Choice, Job

ZERO = ("ddp", "zero1", "zero2", "zero3")
SYNCHRONOUS = ("1f1b", "interleaved", "zb-h1", "zb-v")  # GPipe takes as long as 1F1B and more memory


class Layout(NamedTuple):
    """A grid and its microbatches, which decide what a rank computes."""

    data: int
    pipeline: int
    x: int
    y: int
    z: int
    microbatches: int


def layouts(job: Job, given: Choice, ranks: int) -> Iterator[Layout]:
    """Every grid of `ranks` that leaves no replica without a sequence and no stage without a layer, with every number
    of microbatches that cuts a replica's sequences evenly."""
    shared = given.ring * given.ulysses
    for data, pipeline, box in all_grids(ranks // shared) if ranks % shared == 0 else ():
        workers = data - job.servers
        if workers < 1 or workers > job.batch or pipeline > job.costs.layers or not _allowed(given.algorithm, box):
            continue
        if job.partition is not None and len(job.partition) != pipeline * max(1, given.virtual_stages):
            continue
        sequences = -(-job.batch // workers)
        for microbatches in divisors(sequences):
            yield Layout(data, pipeline, box[0], box[1], box[2], microbatches)


def choices(job: Job, given: Choice, layout: Layout) -> Iterator[Choice]:
    """Every schedule, recomputation (the least first) and way to keep replicas, of those that train as one rank does.
    Whoever asks for another one, as PipeDream or local SGD, keeps it; so does who lists the layers of each stage."""
    searched = given.schedule in ("gpipe", *SYNCHRONOUS) and job.partition is None
    orders = schedules(job.costs.layers, layout.pipeline) if searched else [(given.schedule, given.virtual_stages)]
    methods = ZERO if given.method in ZERO else (given.method,)
    if layout.data * given.ring * given.ulysses == 1 and given.method in ZERO:
        methods = ("ddp",)
    for schedule, virtual_stages in orders:
        for recompute in RECOMPUTE if not job.slices else (given.recompute,):
            for method, expert in itertools.product(methods, expert_ranks(job, given, layout)):
                yield Choice(
                    *layout, schedule, virtual_stages, recompute, method, given.algorithm, given.ring, given.ulysses,
                    expert,
                )  # fmt: skip


def expert_ranks(job: Job, given: Choice, layout: Layout) -> list[int]:
    """Numbers of ranks that experts can be spread over so that none is without one."""
    ranks = layout.data * given.ring * given.ulysses * layout.x * layout.y * layout.z
    spread = given.method in ZERO
    return [each for each in divisors(ranks) if each <= job.experts and (spread or each == 1)]


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


def divisors(number: int) -> list[int]:
    """
    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _allowed(algorithm: str, box: tuple[int, int, int]) -> bool:
    try:
        check_product(algorithm, *box)
    except ValueError:
        return False
    return True
