"""Memory that a process has."""

import resource

import pytest
import torch

from hpctrain import Grid, comm
from hpctrain.resident import most_resident

MIB = 1 << 20


def test_of_one_process():
    before = most_resident()
    assert 0 < before <= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    grown = torch.ones(64 * MIB)  # 256 MiB
    assert most_resident() - before > 200 * MIB
    del grown
    assert most_resident() - before > 200 * MIB


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_shared_memory_counts_once(world):
    """Two ranks map 64 MiB of each other's: half of 128 MiB is each one's."""
    with Grid(world.size) as grid:
        buffer = comm.AllReduceBuffer(grid.data, 16 * MIB, torch.zeros(1))
        buffer.local.fill_(1.0)
        buffer.all_reduce()
        world.Barrier()
        counted = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - most_resident()
        world.Barrier()
    assert 32 * MIB < counted < 96 * MIB
