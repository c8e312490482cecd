"""Checked mode: ranks that call different collectives are named, with their lines, before anything is sent."""

import pytest
import torch
from training_checks import UNEVEN, fitting, train_on

from hpctrain import Grid, comm
from hpctrain.comm.collective_checker import caller

pytestmark = pytest.mark.mpi


def differing(grid, here, there):
    """What is said when the last rank calls `there` and the others `here`; everybody leaves with it, and can go on."""
    axis = grid.tensor.x
    with pytest.raises(comm.Mismatch) as caught:
        (there if axis.rank == axis.size - 1 else here)(axis)
    assert comm.all_reduce(torch.ones(2), axis).tolist() == [axis.size] * 2
    return str(caught.value)


@pytest.mark.ranks(2, 4)
def test_operation_shape_type_and_line(world):
    grid = Grid(tensor=world.size)
    comm.CollectiveChecker(grid)
    x = torch.zeros(4, 3)
    reduce, line = (lambda axis: comm.all_reduce(x, axis)), caller().split(":")[1]
    last = world.size - 1
    message = differing(grid, reduce, lambda axis: comm.all_gather(x, axis))
    if world.size > 2:
        assert message.startswith(f"along x: rank {last} calls all_gather(float32 4×3) at ")
    assert f"all_reduce(float32 4×3) at {'/'.join(__file__.split('/')[-3:])}:{line}" in message
    for there, said in {
        "shape": (lambda axis: comm.all_reduce(x[:3], axis), "all_reduce(float32 3×3)"),
        "type": (lambda axis: comm.all_reduce(x.double(), axis), "all_reduce(float64 4×3)"),
        "root": (lambda axis: comm.broadcast(x, axis, root=1), "broadcast(float32 4×3, 1)"),
        "line": (lambda axis: comm.all_reduce(x, axis), "all_reduce(float32 4×3)"),
    }.values():
        message = differing(grid, reduce, there)
        assert f"rank {last} calls {said} at " in message or world.size == 2
        assert said in message


@pytest.mark.ranks(2)
def test_the_line_is_of_the_caller_of_autograd(world):
    grid = Grid(tensor=2)
    comm.CollectiveChecker(grid)
    x, line = torch.zeros(2, requires_grad=True), caller().split(":")[1]
    said = differing(grid, *(lambda axis, n=n: comm.functional.all_reduce(x[n:], axis) for n in (0, 1)))
    assert said.count(f"test_check.py:{int(line) + 1}") == 2


@pytest.mark.ranks(2)
def test_rows_without_counts_are_alike(world):
    """Where none are given; those that are, say which rank has how many."""
    grid = Grid(tensor=2)
    comm.CollectiveChecker(grid)
    for call in (comm.all_gather, comm.all_gather_start, comm.gather, comm.all_to_all):
        said = differing(grid, *(lambda axis, n=n, call=call: call(torch.zeros(n, 3), axis) for n in (2, 4)))
        name = call.__name__.removesuffix("_start")
        assert f"{name}(float32 2×3)" in said
        assert f"{name}(float32 4×3)" in said
    axis = grid.tensor.x
    mine = torch.zeros(1 + axis.rank, 3)
    assert len(comm.all_gather(mine, axis, counts=[1, 2])) == 3
    assert len(comm.gather(mine, axis, (1, 2))) == (0 if axis.rank else 3)
    assert len(comm.all_to_all(mine, axis, (0, 1 + axis.rank), (0, 0) if axis.rank == 0 else (1, 2))) == 3 * axis.rank


SHAPES = {
    1: [(1, 1, 1)],
    2: [(2, 1, 1), (1, 2, 1), (1, 1, (1, 2, 1))],
    4: [(2, 1, (1, 1, 2)), (1, 1, (2, 2, 1))],
    8: [(1, 1, (2, 2, 2)), (2, 2, (2, 1, 1))],
}


@pytest.mark.ranks(*SHAPES)
def test_training_passes_its_own_checks(world):
    """All layers, the pipeline and data parallelism; the losses are those without checks."""
    for shape in SHAPES[world.size]:
        grid, plain = Grid(*shape), Grid(*shape)
        comm.CollectiveChecker(grid)
        made = fitting(UNEVEN, shape[1])
        assert train_on(grid, made, 2, 1.0)[1:] == train_on(plain, made, 2, 1.0)[1:]


PLACES = {
    1: [(1, 1, 1)],
    4: [(2, 2, 1), (1, 2, (1, 1, 2))],
    6: [(1, 3, (1, 2, 1))],
    8: [(2, 2, (2, 1, 1)), (1, 1, (2, 2, 2))],
}


@pytest.mark.ranks(*PLACES)
def test_members(world):
    """Ranks along each axis, against what their communicators say."""
    for shape in PLACES[world.size]:
        grid = Grid(*shape)
        for axis in grid.axes():
            assert grid.members(axis.name) == axis.comm.allgather(grid.rank)
