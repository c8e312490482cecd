"""Shared memory gives what messages give."""

import errno

import pytest
import torch

from hpctrain import Grid, comm
from hpctrain.comm import windows
from hpctrain.comm.shared import Shared
from hpctrain.comm.workspaces import Workspace, workspace

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


@pytest.mark.mpi(min_size=2)
def test_a_gather_is_valid_until_the_next_but_one_is_started(axis):
    """The last rank still reads the first when rank 0 has begun the third, beside which the second is in use."""
    space, counts, last = workspace(axis, "ahead"), (4,) * axis.size, axis.size - 1

    def begin(turn):
        return space.gather_start(torch.full((4,), float(10 * turn + axis.rank)), counts)

    expected = [[10.0 * turn + rank for rank in range(axis.size)] for turn in range(4)]
    for turn in (0, 1):  # windows are made
        begin(turn).wait()
    for _ in range(6):
        first = begin(1).wait()
        second = begin(2).wait()
        if axis.rank == last:
            axis.comm.recv(source=0)
            assert first[::4].tolist() == expected[1]
        third = begin(3)
        if axis.rank == 0:
            axis.comm.send(None, last)
        assert second[::4].tolist() == expected[2]
        assert third.wait()[::4].tolist() == expected[3]


@pytest.mark.mpi(min_size=2)
def test_a_gather_reserves_little_more_than_the_whole(axis):
    """All windows of a workspace together, for sizes that creep up; the old ones are given back."""
    space = Workspace(axis)
    for rows in (*range(20_000, 20_100), 25_000, 50_000):
        whole = space.gather(torch.zeros(rows // axis.size, 2), (rows // axis.size,) * axis.size)
        reserved = [window.whole.nbytes for window in axis.wire.resources]
        assert len(reserved) <= 2
        assert max(reserved) <= max(1.25 * whole.nbytes + 4096 * axis.size, 1.25 * 1.25 * 160_800)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("make", [
    lambda a: Shared(a, 1000, torch.float32), lambda a: comm.Common(a, 1000, torch.ones(1)),
    lambda a: Workspace(a).room(1000, torch.ones(1)),
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
    assert axis.wire.resources == []
    monkeypatch.undo()
    make(axis)


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
