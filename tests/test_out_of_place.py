"""Gathers and sums in shared memory, in pieces, against those by messages."""

import pytest
import torch

from hpctrain import comm
from hpctrain.comm import out_of_place
from hpctrain.comm.out_of_place import rows_of_all, rows_of_sum, sum_of_all

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3, 4)]


def by_messages(x, axis, counts):
    """What each is to give."""
    rows = x[: counts[axis.rank]]
    return (
        comm.all_gather(rows, axis, counts),
        comm.reduce_scatter(x, axis, counts),
        comm.all_reduce(x.clone(memory_format=torch.contiguous_format), axis),
    )


def in_shared_memory(x, axis, counts):
    return rows_of_all(x[: counts[axis.rank]], axis, counts), rows_of_sum(x, axis, counts), sum_of_all(x, axis)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_equals_messages(line, monkeypatch, dtype):
    """The same numbers, and bytes in the ledger; nothing is taken from the memory of an earlier result."""
    monkeypatch.setattr(out_of_place, "SMALL", 0)
    kept = []
    for piece, counts in [(1 << 18, (3, 1, 2, 4)), (4, (3, 1, 2, 4)), (4, (0, 5, 0, 1)), (3, (2, 0, 0, 0))]:
        monkeypatch.setattr(out_of_place, "PIECE", piece)
        counts, moved = counts[: line.size], []
        x = torch.arange(3.0 * sum(counts)).reshape(3, -1).t().mul(1 + line.rank).to(dtype)  # not contiguous
        for results in (by_messages, in_shared_memory):
            line.transport.traffic.clear()
            found = results(x, line, counts)
            table = line.transport.traffic.table()
            moved.append({key: (cell["sent"], cell["received"]) for key, cell in table.items()})
            kept.append([(each, each.clone()) for each in found])
        assert moved[0] == moved[1] or dtype is torch.bfloat16  # whose all-reduce by messages is made of the other two
        for (expected, _), (got, _) in zip(*kept[-2:]):
            assert got.is_contiguous()
            torch.testing.assert_close(got, expected, rtol=0, atol=0)
    for each, then in (pair for pairs in kept for pair in pairs):
        assert torch.equal(each, then)


def test_paths(line, monkeypatch):
    """Small tensors, axes on several nodes and those with an algorithm of their own go by messages."""
    taken = []
    monkeypatch.setattr(out_of_place, "time_call", lambda axis, name, *arguments: taken.append(name))
    large, counts = torch.ones(out_of_place.SMALL // 4), (out_of_place.SMALL // 4,) + (0,) * (line.size - 1)
    rows = large if line.rank == 0 else large[:0]
    for x in (large, large[1:]):
        sum_of_all(x, line)
    rows_of_all(rows, line, counts)
    rows_of_sum(large, line, counts)
    assert taken == ["all_reduce", "all_gather", "reduce_scatter"]
    comm.choose_all_reduce(line, "ring")
    assert torch.equal(sum_of_all(large, line), large * line.size)
    comm.choose_all_reduce(line, "shared")


def test_after_inference(line):
    """What inference made is written to in training."""
    with torch.inference_mode():
        for _ in range(2):  # there are two windows, in turn
            expected = sum_of_all(torch.ones(1 << 15), line)
    assert torch.equal(sum_of_all(torch.ones(1 << 15), line), expected)
