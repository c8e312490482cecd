"""The product: training on every grid equals an independent serial program, to rounding."""

import dataclasses

import pytest
from training_checks import CORNERS, PLANES, UNEVEN, by_messages, check, every, fitting, in_turn, train_on

from hpctrain import Grid
from hpctrain.choices import OVERLAPS
from hpctrain.grid_shape import all_grids

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3, 4, 6, 8)]


def test_every_grid_of_uneven_sizes(world):
    """All factorisations of the number of ranks: weights after three steps, losses and gradient norms."""
    for data, pipeline, tensor in every(2 if world.size > 4 else 1, all_grids(world.size), 0):
        check(Grid(data, pipeline, tensor), fitting(UNEVEN, pipeline), count=2, clip=1.0, steps=3)


@pytest.mark.ranks(*CORNERS)
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
def test_variants(world, case, change, count, clip):
    shape = dataclasses.replace(UNEVEN, **change)
    for data, pipeline, tensor in in_turn(CORNERS, world.size, case):
        check(Grid(data, pipeline, tensor), fitting(shape, pipeline), count, clip)


@pytest.mark.parametrize(
    ("change", "synchronous"),
    [
        ({}, False),
        ({"dropout": 0.3}, True),  # and every message an MPI_Ssend
        ({"tied": False, "layers": 8, "width": 16, "heads": 4, "vocabulary": 32}, False),  # all even
        ({"heads": 1, "width": 5, "vocabulary": 3}, False),  # ranks without heads, without words
    ],
)
@pytest.mark.parametrize(
    "algorithm", [pytest.param(name, marks=pytest.mark.ranks(*places)) for name, places in PLANES.items()]
)
def test_algorithms(world, case, algorithm, change, synchronous):
    shape = dataclasses.replace(UNEVEN, **change)
    for data, pipeline, tensor in in_turn(PLANES[algorithm], world.size, case):
        grid = Grid(data, pipeline, tensor)
        grid.transport.synchronous = synchronous
        check(grid, fitting(shape, pipeline), count=2, clip=1.0, algorithm=algorithm)


# Boxes in which each overlap has something to run beside, alone and with the other axes.
OVERLAPPED = {
    1: [(1, 1, (1, 1, 1))],
    2: [(1, 1, (2, 1, 1)), (1, 1, (1, 1, 2))],
    3: [(1, 1, (3, 1, 1)), (1, 1, (1, 1, 3))],
    4: [(1, 1, (2, 1, 2)), (2, 1, (1, 1, 2)), (1, 2, (1, 1, 2)), (1, 1, (1, 1, 4))],
    8: [(1, 2, (2, 1, 2))],
}


@pytest.mark.ranks(*OVERLAPPED)
@pytest.mark.parametrize(
    ("overlap", "way"),
    [
        *(((name,), "windows") for name in OVERLAPS),
        *(((), way) for way in ("windows", "messages")),
        *((OVERLAPS, way) for way in ("windows", "messages", "synchronous messages")),
    ],
)
def test_overlaps(world, case, overlap, way):
    for data, pipeline, tensor in in_turn(OVERLAPPED, world.size, case):
        grid = Grid(data, pipeline, tensor)
        grid.transport.synchronous = way == "synchronous messages"
        if way != "windows":
            by_messages(grid)
        check(grid, fitting(UNEVEN, pipeline), count=3, clip=1.0, overlap=overlap)


@pytest.mark.ranks(*CORNERS)
def test_synchronous_sends(world):
    """The same with MPI_Ssend, under which any deadlock that buffering hides would hang."""
    for data, pipeline, tensor in CORNERS[world.size]:
        grid = Grid(data, pipeline, tensor)
        grid.transport.synchronous = True
        check(grid, fitting(UNEVEN, pipeline), count=3, clip=1.0)


@pytest.mark.ranks(*CORNERS)
def test_same_run_same_bits(world):
    """The same run twice gives the same bits."""
    data, pipeline, tensor = CORNERS[world.size][0]
    first, second = (train_on(Grid(data, pipeline, tensor), UNEVEN, 2, 1.0)[1:] for _ in range(2))
    assert first == second
