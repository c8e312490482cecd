"""Shared memory gives what messages give."""

import pytest
import torch

from hpctrain import Grid, comm
from hpctrain.comm.shared import Shared
from hpctrain.comm.windows import Workspace

pytestmark = pytest.mark.mpi


@pytest.fixture
def axis(world):
    return Grid(tensor=world.size).tensor.x


@pytest.mark.parametrize("numel", [0, 1, 5, 200_001])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sum_in_place(axis, numel, dtype):
    shared = Shared(axis, numel, dtype)
    for turn in range(3):
        shared.mine.copy_(torch.arange(numel) % 7 + axis.rank + turn)
        shared.sum()
        p = axis.size
        expected = ((torch.arange(numel) % 7 + turn) * p + p * (p - 1) // 2).to(dtype)
        assert torch.equal(shared.mine, expected)


@pytest.mark.mpi(min_size=3)
def test_16_bit_sums_are_rounded_once(axis):
    shared = Shared(axis, 3, torch.bfloat16)
    shared.mine.fill_(256.0 if axis.rank == 0 else 1.0)
    shared.sum()
    assert torch.equal(shared.mine, torch.full((3,), 256.0 + axis.size - 1).to(torch.bfloat16))


def test_workspace_equals_messages(axis):
    """Sizes grow and shrink, ranks run ahead; every result is compared."""
    workspace = Workspace(axis)
    generator = torch.Generator().manual_seed(axis.rank)
    for turn in range(40):
        counts = tuple((r + turn) % 3 * (1 + turn // 10) for r in range(axis.size))
        part = torch.randn(counts[axis.rank], 4, generator=generator)
        gathered = workspace.gather(part, counts)
        assert torch.equal(gathered, comm.all_gather(part, axis, counts))
        summands = torch.randn(sum(counts), generator=generator, dtype=torch.float64)
        room = workspace.room(sum(counts), summands)
        room.copy_(summands)
        reduced = workspace.reduce(room, counts)
        torch.testing.assert_close(reduced, comm.reduce_scatter(summands, axis, counts), rtol=1e-14, atol=1e-14)


def test_workspace_counts_like_messages(axis):
    counts = tuple(range(1, axis.size + 1))
    tables = []
    for gather, reduce in (
        (Workspace(axis).gather, Workspace(axis)),
        (lambda part, counts: comm.all_gather(part, axis, counts), None),
    ):
        axis.wire.traffic.clear()
        gather(torch.zeros(axis.rank + 1, 3), counts)
        if reduce:
            reduce.reduce(reduce.room(sum(counts), torch.zeros(1)), counts)
        else:
            comm.reduce_scatter(torch.zeros(sum(counts)), axis, counts)
        tables.append(axis.wire.traffic.table())
    assert tables[0] == tables[1]
