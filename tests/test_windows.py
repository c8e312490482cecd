"""Shared memory gives what messages give."""

import errno
import time

import pytest
import torch

from hpctrain import Grid, comm
from hpctrain.comm import windows
from hpctrain.comm.shared_memory_buffer import SharedMemoryBuffer
from hpctrain.comm.workspace import new_workspace

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3, 4, 6)]
HERE = torch.empty(0)  # in host memory


@pytest.fixture
def axis(world):
    return Grid(tensor=world.size).tensor.x


@pytest.mark.parametrize("numel", [0, 1, 5, 200_001])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sum_in_place(axis, numel, dtype):
    shared = SharedMemoryBuffer(axis, numel, dtype)
    for turn in range(3):
        shared.local.copy_(torch.arange(numel) % 7 + axis.rank + turn)
        shared.sum()
        p = axis.size
        expected = ((torch.arange(numel) % 7 + turn) * p + p * (p - 1) // 2).to(dtype)
        assert torch.equal(shared.local, expected)


@pytest.mark.ranks(3, 4, 6)
def test_16_bit_sums_are_rounded_once(axis):
    shared = SharedMemoryBuffer(axis, 3, torch.bfloat16)
    shared.local.fill_(256.0 if axis.rank == 0 else 1.0)
    shared.sum()
    assert torch.equal(shared.local, torch.full((3,), 256.0 + axis.size - 1).to(torch.bfloat16))


def test_workspace_equals_messages(axis):
    """Sizes grow and shrink, ranks run ahead; every result is compared."""
    workspace = new_workspace(axis, HERE)
    generator = torch.Generator().manual_seed(axis.rank)
    for turn in range(40):
        counts = tuple((r + turn) % 3 * (1 + turn // 10) for r in range(axis.size))
        part = torch.randn(counts[axis.rank], 4, generator=generator)
        gathered = workspace.gather(part, counts)
        assert torch.equal(gathered, comm.all_gather(part, axis, counts))
        summands = torch.randn(sum(counts), generator=generator, dtype=torch.float64)
        buffer = workspace.buffer(sum(counts), summands)
        buffer.copy_(summands)
        reduced = workspace.reduce(buffer, counts)
        torch.testing.assert_close(reduced, comm.reduce_scatter(summands, axis, counts), rtol=1e-14, atol=1e-14)


def test_rows_whose_numbers_only_their_ranks_know(axis):
    """Also where the window is too small for some of them; beside calls that know the numbers."""
    workspace = new_workspace(axis, HERE)
    for turn, rows in enumerate((3, 2000, 1, 0, 5000)):
        counts = tuple(rows if r == turn % axis.size else (r + turn) % 3 for r in range(axis.size))
        part = torch.arange(3.0 * counts[axis.rank]).view(-1, 3) + axis.rank
        axis.transport.traffic.clear()
        whole, found = workspace.gather_counted(part)
        moved = axis.transport.traffic.total("sent"), axis.transport.traffic.total("received")
        assert found == counts
        expected = comm.all_gather(part, axis, counts)
        assert torch.equal(whole, expected)
        others = axis.size - 1
        assert moved == (others * (8 + part.nbytes), others * 8 + whole.nbytes - part.nbytes)
        assert torch.equal(workspace.gather(part, counts), expected)
        assert torch.equal(whole, expected)  # no scratch memory


@pytest.mark.ranks(2)
def test_a_result_stays_until_the_next_call(axis):
    """Though the other rank is at that already."""
    workspace = new_workspace(axis, HERE)
    for turn in range(3):
        whole = workspace.gather(torch.full((2, 1), float(turn)), (2, 2))
        if axis.rank == 0:
            time.sleep(0.05)
        assert whole.eq(turn).all()


@pytest.mark.ranks(2, 3, 4, 6)
def test_a_gather_reserves_little_more_than_the_whole(axis):
    """All windows of a workspace together, for sizes that creep up; the old ones are given back."""
    scratch = new_workspace(axis, HERE)
    for rows in (*range(20_000, 20_100), 25_000, 50_000):
        whole = scratch.gather(torch.zeros(rows // axis.size, 2), (rows // axis.size,) * axis.size)
        reserved = [window.whole.nbytes for window in axis.transport.resources]
        assert len(reserved) <= 2
        assert max(reserved) <= max(1.25 * whole.nbytes + 4096 * axis.size, 1.25 * 1.25 * 160_800)


@pytest.mark.ranks(2, 3, 4, 6)
@pytest.mark.parametrize("make", [
    lambda a: SharedMemoryBuffer(a, 1000, torch.float32), lambda a: comm.ShardedBuffer(a, 1000, torch.ones(1)),
    lambda a: new_workspace(a, HERE).buffer(1000, torch.ones(1)),
])  # fmt: skip
def test_too_little_shared_memory_is_said_by_all_ranks(axis, make, monkeypatch):
    """Where one of them sees it, before MPI is asked; or when the system cannot provide what MPI has promised."""
    if axis.rank == axis.size - 1:
        monkeypatch.setattr(windows, "_space", lambda: (3000.0, "small-node"))
    with pytest.raises(OSError, match="MB of shared memory for the . ranks of x do not fit: ") as raised:
        make(axis)
    assert "/dev/shm of small-node has 0.0 MB free. Enlarge it (mount -o remount,size=SIZE" in str(raised.value)
    assert raised.value.errno == errno.ENOSPC
    monkeypatch.undo()
    if axis.rank == 0:
        monkeypatch.setattr(windows, "_populate", lambda part: False)
    with pytest.raises(OSError, match="do not fit: /dev/shm"):
        make(axis)
    assert axis.transport.resources == []
    monkeypatch.undo()
    make(axis)


def test_workspace_counts_like_messages(axis):
    counts = tuple(range(1, axis.size + 1))
    tables = []
    for gather, reduce in (
        (new_workspace(axis, HERE).gather, new_workspace(axis, HERE)),
        (lambda part, counts: comm.all_gather(part, axis, counts), None),
    ):
        axis.transport.traffic.clear()
        gather(torch.zeros(axis.rank + 1, 3), counts)
        if reduce:
            reduce.reduce(reduce.buffer(sum(counts), torch.zeros(1)), counts)
        else:
            comm.reduce_scatter(torch.zeros(sum(counts)), axis, counts)
        tables.append(axis.transport.traffic.table())
    assert tables[0] == tables[1]
