"""The product: training on every grid equals an independent serial program, to rounding."""

import dataclasses
import functools
from itertools import combinations

import pytest
import reference
import torch

from hpctrain import Grid, Key
from hpctrain.algorithms import OVERLAPS
from hpctrain.grid import all_grids
from hpctrain.layers import Tokens, algorithm_of
from hpctrain.models.export import whole_parameters
from hpctrain.models.gpt2 import GPT2, GPT2Shape
from hpctrain.pipeline import schedule
from hpctrain.shard import split, subsplit
from hpctrain.train.batches import Microbatch
from hpctrain.train.optimizer import adamw
from hpctrain.train.trainer import Trainer

pytestmark = pytest.mark.mpi

STEPS, BATCH, LENGTH = 3, 5, 7
# Nothing divides: 9 layers over 2, 4, 8 stages; 3 heads, width 15, vocabulary 23 and batch 5 over 2, 4, 8 ranks.
UNEVEN = GPT2Shape(layers=9, width=15, heads=3, context=8, vocabulary=23)


def batches(shape, steps=STEPS):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(shape.vocabulary, (BATCH, LENGTH + 1), generator=generator) for _ in range(steps)]


def microbatches(grid, batch, step, count, algorithm="agarwal", idle=0):
    """This rank's part of a global batch, cut by hand; none for the last `idle` ranks of the data axis."""
    working = grid.data.size - idle
    mine = split(len(batch), working, grid.data.rank) if grid.data.rank < working else slice(0, 0)
    made = []
    for m in range(count):
        part = subsplit(mine, count, m)
        tokens = Tokens.of(grid, part.stop - part.start, LENGTH, part.start, step, algorithm)
        rows = batch[tokens.first : tokens.first + tokens.sequences]
        targets = batch[tokens.inner.start : tokens.inner.stop, 1:].reshape(-1)
        made.append(Microbatch(tokens, rows[:, :-1].reshape(-1), targets, 1 / (len(batch) * LENGTH)))
    return made


def train_on(
    grid, shape, count, clip, steps=STEPS, algorithm="agarwal", overlap=OVERLAPS, pipeline="1f1b", slices=(), cut=None
):
    made = algorithm_of(grid, algorithm, overlap)
    order = schedule(pipeline, grid.pipeline.size, count, slices=len(slices) or None)
    model = GPT2(grid, shape, cut, order.placement, algorithm=made, key=Key(3), dtype=torch.float64)
    trainer = Trainer(model, grid, adamw(model.parameters(), 0.1), order, clip, slices=slices)
    for group in trainer.optimizer.param_groups:
        group["lr"] = 1e-2
    results = [
        trainer.step(microbatches(grid, batch, step, count, algorithm))
        for step, batch in enumerate(batches(shape, steps))
    ]
    return model, [loss for loss, _ in results], [norm for _, norm in results]


@functools.cache
def serial(shape, clip):
    """The reference on this rank alone, from the whole weights of a grid of one rank."""
    from mpi4py import MPI

    alone = Grid(comm=MPI.COMM_SELF)
    model = GPT2(alone, shape, key=Key(3), dtype=torch.float64)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    keep = masks(model, shape)
    losses, norms = reference.train(
        weights, batches(shape), shape.layers, shape.heads, lr=1e-2, clip=clip, weight_decay=0.1, keep=keep
    )
    return weights, losses, norms


def masks(model, shape):
    """Dropout of the reference: the masks by (sequence, position) of the whole batch, from the named streams."""

    def at(step):
        def keep(name, x):
            if not shape.dropout:
                return x
            key = model.get_submodule(name).key
            mask = key.mask(0, x.numel(), shape.dropout, step).view(x.shape)
            return x * mask / (1 - round(shape.dropout * 65536) / 65536)

        return keep

    return at


def check(grid, shape, count, clip, **how):
    weights, losses, norms = serial(shape, clip)
    model, *got = train_on(grid, shape, count, clip, **how)
    assert got[0] == pytest.approx(losses, rel=1e-12)
    assert got[1] == pytest.approx(norms, rel=1e-11)
    for name, whole in whole_parameters(model, grid):
        if grid.rank == 0:
            torch.testing.assert_close(whole, weights[name], rtol=1e-10, atol=1e-12)


def fitting(shape, pipeline):
    """The shape with as few layers as leave the stages of the pipeline unequal."""
    return dataclasses.replace(shape, layers=max(3, pipeline + 1))


def test_every_grid_of_uneven_sizes(world):
    """All factorisations of the number of ranks: weights after three steps, losses and gradient norms."""
    for data, pipeline, tensor in all_grids(world.size):
        check(Grid(data, pipeline, tensor), fitting(UNEVEN, pipeline), count=2, clip=1.0)


# Each of these on grids that split every axis at least once.
CORNERS = {
    1: [(1, 1, 1)],
    2: [(2, 1, 1), (1, 2, 1), (1, 1, (2, 1, 1)), (1, 1, (1, 2, 1)), (1, 1, (1, 1, 2))],
    4: [(2, 2, 1), (1, 2, (1, 2, 1)), (2, 1, (1, 1, 2)), (1, 1, (2, 2, 1)), (1, 1, (4, 1, 1))],
    8: [(2, 2, 2), (1, 1, (2, 2, 2)), (1, 2, (2, 1, 2)), (8, 1, 1)],
}


@pytest.mark.parametrize(
    ("change", "count", "clip"),
    [
        ({"tied": False}, 2, 1.0),
        ({"dropout": 0.3}, 2, 1.0),
        ({}, 1, 0.0),  # one microbatch, no clipping
        ({}, 6, 0.3),  # more microbatches than sequences; the clipping always bites
        ({"layers": 8, "width": 16, "heads": 4, "vocabulary": 32}, 2, 1.0),  # all even
        ({"heads": 1, "width": 5, "vocabulary": 3}, 2, 1.0),  # ranks without heads, without words
    ],
)
def test_variants(world, change, count, clip):
    shape = dataclasses.replace(UNEVEN, **change)
    for data, pipeline, tensor in CORNERS.get(world.size, []):
        check(Grid(data, pipeline, tensor), fitting(shape, pipeline), count, clip)


# Every form of tensor grid that each algorithm works on, alone and with the other axes.
PLANES = {
    "megatron": {1: [(1, 1, 1)], 2: [(1, 1, (2, 1, 1))], 4: [(2, 1, (2, 1, 1)), (1, 1, (4, 1, 1))]},
    "cannon": {1: [(1, 1, 1)], 4: [(1, 1, (2, 2, 1))], 8: [(1, 2, (2, 2, 1))]},
    "summa": {
        2: [(1, 1, (2, 1, 1)), (1, 1, (1, 2, 1))],
        3: [(1, 1, (1, 3, 1))],
        4: [(1, 1, (2, 2, 1)), (2, 1, (1, 2, 1))],
        6: [(1, 1, (3, 2, 1)), (1, 1, (2, 3, 1))],
        8: [(1, 1, (2, 4, 1)), (2, 2, (2, 1, 1))],
    },
    "two_half_d": {2: [(1, 1, (1, 1, 2))], 4: [(1, 1, (2, 2, 1)), (1, 2, (1, 1, 2))], 8: [(1, 1, (2, 2, 2))]},
}


@pytest.mark.parametrize(
    ("change", "synchronous"),
    [
        ({}, False),
        ({"dropout": 0.3}, True),  # and every message an MPI_Ssend
        ({"tied": False, "layers": 8, "width": 16, "heads": 4, "vocabulary": 32}, False),  # all even
        ({"heads": 1, "width": 5, "vocabulary": 3}, False),  # ranks without heads, without words
    ],
)
@pytest.mark.parametrize("algorithm", PLANES)
def test_algorithms(world, algorithm, change, synchronous):
    shape = dataclasses.replace(UNEVEN, **change)
    for data, pipeline, tensor in PLANES[algorithm].get(world.size, []):
        grid = Grid(data, pipeline, tensor)
        grid.wire.synchronous = synchronous
        check(grid, fitting(shape, pipeline), count=2, clip=1.0, algorithm=algorithm)


# Boxes in which each overlap has something to run beside, alone and with the other axes.
OVERLAPPED = {
    1: [(1, 1, (1, 1, 1))],
    2: [(1, 1, (2, 1, 1)), (1, 1, (1, 1, 2))],
    3: [(1, 1, (3, 1, 1)), (1, 1, (1, 1, 3))],
    4: [(1, 1, (2, 1, 2)), (2, 1, (1, 1, 2)), (1, 2, (1, 1, 2)), (1, 1, (1, 1, 4))],
    8: [(1, 2, (2, 1, 2))],
}


@pytest.mark.parametrize(
    ("overlap", "way"),
    [
        *(((name,), "windows") for name in OVERLAPS),
        *(((), way) for way in ("windows", "messages")),
        *((OVERLAPS, way) for way in ("windows", "messages", "synchronous messages")),
    ],
)
def test_overlaps(world, overlap, way):
    for data, pipeline, tensor in OVERLAPPED.get(world.size, []):
        grid = Grid(data, pipeline, tensor)
        grid.wire.synchronous = way == "synchronous messages"
        if way != "windows":
            by_messages(grid)
        check(grid, fitting(UNEVEN, pipeline), count=3, clip=1.0, overlap=overlap)


def by_messages(grid):
    """As if the ranks of every axis shared no memory."""
    for axis in (grid.data, grid.pipeline, *(grid.plane(*n) for k in (1, 2, 3) for n in combinations("xyz", k))):
        axis.one_node = False


def test_synchronous_sends(world):
    """The same with MPI_Ssend, under which any deadlock that buffering hides would hang."""
    for data, pipeline, tensor in CORNERS.get(world.size, []):
        grid = Grid(data, pipeline, tensor)
        grid.wire.synchronous = True
        check(grid, fitting(UNEVEN, pipeline), count=3, clip=1.0)


def test_same_run_same_bits(world):
    """The same run twice gives the same bits."""
    data, pipeline, tensor = CORNERS.get(world.size, [(world.size, 1, 1)])[0]
    first, second = (train_on(Grid(data, pipeline, tensor), UNEVEN, 2, 1.0)[1:] for _ in range(2))
    assert first == second
