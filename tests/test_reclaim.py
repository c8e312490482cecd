"""What was made for grids that nobody uses any more is freed when the next grid is made."""

import gc

import pytest
import torch

from hpctrain import Grid, comm

pytestmark = pytest.mark.mpi


@pytest.mark.ranks(2)
def test_dropped_grids_are_freed(world):
    """When the next one is made: those that are gone on all ranks, and of which no memory is used."""
    watched, used = [], None
    for number in range(300):
        grid = Grid(tensor=2)
        watched.append(grid.comm)
        if number == 0:
            comm.CollectiveChecker(grid)
            comm.Watchdog(grid, 60)  # a thread, and a cycle
        if number == 100:
            used = (
                comm.ReplicatedBuffer(grid.data, 10, torch.ones(1)),
                comm.workspace(grid.tensor.x, torch.ones(3), "a"),
            )
        if number == 200 and world.rank == 0:
            kept = grid
        del grid
    gc.collect()
    Grid(tensor=2).free()
    alive = [number for number, made in enumerate(watched) if made]
    assert alive == [100, 200]  # a window is in use; rank 0 has it
    assert world.allreduce(1) == 2
    if world.rank == 0:
        assert (kept.comm.size, kept.tensor.x.comm.size) == (2, 2)
        del kept
    del used
    gc.collect()
    Grid(tensor=2).free()
    assert not any(watched)


def test_the_collector_of_cycles_runs_seldom(world, monkeypatch):
    """However many grids stay: with the one that is dropped there are 16 each time."""
    calls = []
    monkeypatch.setattr(gc, "collect", lambda: calls.append(1))
    own = world.Dup()
    kept = [Grid(tensor=world.size, comm=own) for _ in range(15)]
    for _ in range(20):
        Grid(tensor=world.size, comm=own)
    assert len(calls) == 1
    for grid in kept:
        grid.free()
    own.Free()


@pytest.mark.ranks(2)
def test_memory_of_a_dropped_grid(world):
    """It is there as long as a tensor is in it."""
    grid = Grid(tensor=2)
    mine = comm.workspace(grid.tensor.x, torch.ones(3), "a").gather(torch.full((3,), 1.0 + world.rank), (3, 3))
    handle = grid.comm
    del grid
    gc.collect()
    Grid(tensor=2).free()
    assert handle
    assert mine.tolist() == [1.0] * 3 + [2.0] * 3
    del mine
    gc.collect()
    Grid(tensor=2).free()
    assert not handle
