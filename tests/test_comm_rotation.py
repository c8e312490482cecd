"""Blocks that visit every rank and sums that come back; rows that become slices of another dim: by each way they go."""

import random
import time

import pytest
import torch

from hpctrain import Grid
from hpctrain.comm.workspace import new_workspace

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3, 4, 8)]

WAYS = ["shared memory", "hops", "gathered"]


def ring_of(world, way):
    grid = Grid(data=(1, world.size, 1))
    grid.transport.synchronous = way != "shared memory"
    grid.ring.one_node = way == "shared memory"
    return grid.ring, new_workspace(grid.ring, torch.empty(0), windows=1)


def sizes(axis):
    return tuple(3 * ((r + 1) % 3) for r in range(axis.size))  # 3, 6, 0, 3, 6, 0, …


def block(owner, count, times=1, dtype=torch.float64):
    return (torch.arange(count, dtype=dtype) + 100 * owner) * times


def carried(workspace, axis, way, counts, dtype, sum_dtype, times):
    """The owners met with their blocks, and the sum of what all ranks made of this rank's."""
    part = block(axis.rank, counts[axis.rank], times, dtype)
    rotation = workspace.rotate(part, counts, sum_dtype, way == "gathered")
    met = []
    for owner, found in rotation:
        met.append((owner, found.clone()))
        time.sleep(random.choice((0, 0, 1e-3)))
        rotation.progress()
        for share in (axis.rank, 1):  # what this rank makes of it, in two parts
            rotation.sum().add_(found.to(sum_dtype) * share)
    return met, rotation.total()


@pytest.mark.parametrize("way", WAYS)
def test_every_block_visits_and_sums_return(world, way):
    axis, workspace = ring_of(world, way)
    rank, size = axis.rank, axis.size
    for times in range(1, 9):  # one window is taken again and again, by blocks of other sizes
        counts = tuple(count * (1 + times % 3) for count in sizes(axis))
        met, total = carried(workspace, axis, way, counts, torch.float64, torch.float64, times)
        assert [owner for owner, _ in met] == [(rank - hop) % size for hop in range(size)]
        for owner, found in met:
            assert torch.equal(found, block(owner, counts[owner], times))
        assert torch.equal(total, block(rank, counts[rank], times) * (size * (size + 1) / 2))


@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_have_nothing_to_add(world, way):
    """Nobody asks for the sums of blocks of even owners but these themselves."""
    axis, workspace = ring_of(world, way)
    counts = (3,) * axis.size
    for _ in range(3):
        rotation = workspace.rotate(block(axis.rank, 3), counts, torch.float64, way == "gathered")
        for owner, found in rotation:
            if owner % 2 or owner == axis.rank:
                rotation.sum().add_(found)
        assert torch.equal(rotation.total(), block(axis.rank, 3) * (axis.size if axis.rank % 2 else 1))


@pytest.mark.parametrize("way", WAYS)
def test_sums_are_wider_than_blocks(world, way):
    """257 and more are no bfloat16 numbers, and their sum is none either."""
    axis, workspace = ring_of(world, way)
    counts = (4,) * axis.size
    _, total = carried(workspace, axis, way, counts, torch.bfloat16, torch.float32, 1)
    blocks = block(axis.rank, 4, dtype=torch.bfloat16).float()
    assert total.dtype == torch.float32
    assert torch.equal(total, blocks * (axis.size * (axis.size + 1) / 2))


@pytest.mark.parametrize("way", WAYS)
def test_bytes_of_a_rotation(world, way):
    """All others' blocks, and a sum for each of them, once."""
    axis, workspace = ring_of(world, way)
    counts = (6,) * axis.size
    carried(workspace, axis, way, counts, torch.bfloat16, torch.float32, 1)
    moved = (axis.size - 1) * 6 * (2 + 4)
    assert axis.transport.traffic.total("received", ("ring",)) == moved
    assert axis.transport.traffic.total("sent", ("ring",)) == moved


def test_blocks_alone_need_no_sums(world):
    for way in WAYS:
        axis, workspace = ring_of(world, way)
        counts = sizes(axis)
        for times in (1, 2, 3):
            part = block(axis.rank, counts[axis.rank], times)
            rotation = workspace.rotate(part, counts, gather=way == "gathered")
            found = {owner: here.clone() for owner, here in rotation}
            assert all(torch.equal(found[owner], block(owner, counts[owner], times)) for owner in range(axis.size))


# Rows and slices


def whole(heads, rows, seed=0, dtype=torch.float64):
    return torch.randn(2, heads, rows, 3, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rows_of(counts, rank):
    return slice(sum(counts[:rank]), sum(counts[: rank + 1]))


def slices_of(size):
    """Of a tensor of 5, disjoint and uneven, some empty; of one of 2, which several ranks share."""
    edges = [5 * r // size for r in range(size + 1)] if size < 5 else [min(r, 5) for r in range(size + 1)]
    disjoint = [slice(a, b) for a, b in zip(edges, edges[1:])]
    shared = [slice(0, 2) if r == 0 else slice(1, 2) for r in range(size)]
    return disjoint, shared


@pytest.mark.parametrize("one_node", [True, False])
def test_rows_become_slices_and_their_adjoint(world, one_node):
    grid = Grid(data=(1, 1, world.size))
    axis = grid.ulysses
    axis.one_node, grid.transport.synchronous = one_node, not one_node
    workspace, rank, size = new_workspace(axis, torch.empty(0), windows=1), axis.rank, axis.size
    slices = slices_of(size)
    for turn in range(4):
        counts = tuple((r + turn) % 3 for r in range(size))
        mine = rows_of(counts, rank)
        wholes = [whole(5, sum(counts), turn), whole(2, sum(counts), turn + 9)]
        out = workspace.rows_to_slices([t[:, :, mine] for t in wholes], counts, slices)
        if size > 1:
            for found, t, of in zip(out, wholes, slices):
                assert torch.equal(found, t[:, of[rank]])
            every = [[whole(5, sum(counts), 50 + r), whole(2, sum(counts), 70 + r)] for r in range(size)]
            back = workspace.slices_to_rows([t[:, of[rank]] for t, of in zip(every[rank], slices)], counts, slices)
            for found, t, of in zip(back, range(2), slices):
                expected = torch.zeros_like(wholes[t])
                for r in range(size):
                    expected[:, of[r]] += every[r][t][:, of[r]]
                torch.testing.assert_close(found, expected[:, :, mine], rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("one_node", [True, False])
def test_bytes_of_rows_to_slices(world, one_node):
    axis = Grid(data=(1, 1, world.size)).ulysses
    axis.one_node = one_node
    workspace, rank, size = new_workspace(axis, torch.empty(0)), axis.rank, axis.size
    counts, slices = tuple(1 + r % 3 for r in range(size)), slices_of(size)
    parts = [whole(5, counts[rank]), whole(2, counts[rank])]
    out = workspace.rows_to_slices(parts, counts, slices)
    item = 2 * 3 * 8  # of a row and head: 2 of dim 0, 3 of the last dim, float64
    mine = sum(of[rank].stop - of[rank].start for of in slices)
    others = sum(of[r].stop - of[r].start for of in slices for r in range(size) if r != rank)
    received, sent = (sum(counts) - counts[rank]) * mine * item, counts[rank] * others * item
    if size > 1:
        entry = axis.transport.traffic.table()["ulysses", "all_to_all"]
        assert (entry["received"], entry["sent"]) == (received, sent)
        axis.transport.traffic.clear()
        workspace.slices_to_rows(out, counts, slices)
        entry = axis.transport.traffic.table()["ulysses", "all_to_all"]
        assert (entry["sent"], entry["received"]) == (received, sent)


def test_shared_slices_are_summed_in_float32(world):
    """256 + 1 + 1 + … in bfloat16 stays 256."""
    for one_node in (True, False):
        axis = Grid(data=(1, 1, world.size)).ulysses
        axis.one_node = one_node
        workspace = new_workspace(axis, torch.empty(0))
        counts, slices = (1,) * axis.size, ([slice(0, 1)] * axis.size,)
        part = torch.full((1, 1, axis.size, 1), 1.0 if axis.rank else 256.0, dtype=torch.bfloat16)
        (total,) = workspace.slices_to_rows([part], counts, slices)
        expected = torch.tensor(256.0 + axis.size - 1).bfloat16()
        assert axis.size == 1 or total.item() == expected.item()
