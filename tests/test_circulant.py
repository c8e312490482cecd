"""Collectives of small blocks on many ranks: results, bytes and messages of each rank, blocking and started."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain import Grid, comm
from hpctrain.comm import circulant, functional

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3, 4, 6, 8)]

# ranks: rounds, the farthest blocks first: (how far, how many)
ROUNDS = {
    2: [(1, 1)], 3: [(2, 1), (1, 1)], 4: [(2, 2), (1, 1)], 6: [(4, 2), (2, 2), (1, 1)], 8: [(4, 4), (2, 2), (1, 1)],
}  # fmt: skip


class Counting:
    """A communicator; `sent` and `received` are the bytes of each message that is begun."""

    def __init__(self, comm):
        self._comm = comm
        self.clear()

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def clear(self):
        self.sent, self.received = [], []

    def Isend(self, message, *arguments):
        self.sent.append(message[0].nbytes)
        return self._comm.Isend(message, *arguments)

    def Irecv(self, message, *arguments):
        self.received.append(message[0].nbytes)
        return self._comm.Irecv(message, *arguments)


@pytest.fixture(scope="module")
def axis(world):
    made = Grid(data=world.size).data
    made.comm = Counting(made.comm)
    return made


@pytest.fixture(autouse=True)
def few_ranks_are_many(monkeypatch):
    monkeypatch.setattr(circulant, "RANKS", 2)


def everyones(axis, shape, dtype=torch.float64):
    """What each rank gives, known to all: whole numbers, of which sums are exact."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(0, 8, (axis.size, *shape), generator=generator).to(dtype)


def test_rounds(axis):
    assert circulant._rounds(axis.size) == ROUNDS[axis.size]


def check(axis, name, blocks, call, expected):
    """The result, and that the ranks moved `blocks` times 8 bytes each, on average, in few messages; all counted."""
    axis.transport.traffic.clear()
    axis.comm.clear()
    result = call()
    assert torch.equal(result, expected)
    ((axis_name, kind), entry), *others = axis.transport.traffic.table().items()
    assert (axis_name, kind, entry["calls"], others) == ("data", name, 1, [])
    assert len(axis.comm.sent) <= 2 * len(ROUNDS[axis.size])
    for what, messages in (("sent", axis.comm.sent), ("received", axis.comm.received)):
        assert entry[what] == sum(messages)
        assert axis.comm.allreduce(entry[what]) == axis.size * blocks * 8
    return entry


@given(rows=st.integers(1, 30), width=st.integers(1, 3))
def test_blocks_that_all_ranks_have(axis, rows, width):
    """Also where they differ by a row, or there are fewer rows than ranks. A rank gets the others' blocks once, and
    gives partial sums of them once."""
    p, r = axis.size, axis.rank
    counts = tuple(rows // p + (n < rows % p) for n in range(p))
    start = sum(counts[:r])
    own = slice(start, start + counts[r])
    whole = everyones(axis, (rows, width))
    blocks = (p - 1) * rows * width / p
    others = 8 * (rows - counts[r]) * width

    def gather():
        return comm.all_gather_start(whole[0][own], axis, counts).wait()

    def gather_in_place():
        out = torch.zeros_like(whole[0])
        out[own] = whole[0][own]
        assert comm.all_gather_start(out[own], axis, counts, out=out).wait() is out
        return out

    def reduce():
        mine = whole[r].clone()
        total = comm.reduce_scatter_start(mine, axis, counts).wait()
        assert torch.equal(mine, whole[r])
        return total

    for call in (gather, gather_in_place):
        assert check(axis, "all_gather", blocks, call, whole[0])["received"] == others
    assert check(axis, "reduce_scatter", blocks, reduce, whole.sum(0)[own])["sent"] == others


@pytest.mark.parametrize("block", [1, 3])
def test_blocks_from_all_to_all(axis, block):
    p, r = axis.size, axis.rank
    given = everyones(axis, (p, block, 2))
    # block n travels in a round for each one in the binary form of n
    moved = 2 * block * sum(bin(n).count("1") for n in range(p))

    def swap():
        return comm.all_to_all(given[r].view(p * block, 2), axis)

    check(axis, "all_to_all", moved, swap, given[:, r].reshape(p * block, 2))
    x = given[r].view(p * block, 2).clone().requires_grad_()
    functional.all_to_all(x, axis).backward(given[:, r].reshape(p * block, 2))
    assert torch.equal(x.grad, x)


@pytest.mark.ranks(3, 4, 6, 8)
def test_16_bit_sums_are_rounded_once(axis):
    """256 + 1 + 1 + ... in bfloat16 stays 256 when every partial sum is rounded; blocking and started alike."""
    mine = torch.full((2 * axis.size,), 256.0 if axis.rank == 0 else 1.0, dtype=torch.bfloat16)
    expected = torch.full((2,), 256.0 + axis.size - 1)
    sums = {"start": lambda **how: comm.reduce_scatter_start(mine, axis, **how).wait(),
            "blocking": lambda **how: comm.reduce_scatter(mine, axis, **how)}  # fmt: skip
    for call in sums.values():
        axis.comm.clear()
        assert torch.equal(call(), expected.bfloat16())
        assert torch.equal(call(dtype=torch.float32), expected)
        assert axis.comm.sent  # not by Sendrecv


def test_what_does_not_pay_goes_directly(axis):
    """Large blocks, blocks of one rank only, an all-to-all with counts: each block goes to the rank that wants it."""
    p, r = axis.size, axis.rank
    large = torch.full((1, circulant.BLOCK_BYTES // 4 + 1), float(r))
    served = (0,) * (p - 1) + (5,)
    serves = r == p - 1
    calls = {
        "all_gather": (lambda: comm.all_gather_start(large, axis).wait()[:, 0], p - 1, p - 1),
        "reduce_scatter": (
            lambda: comm.reduce_scatter_start(torch.ones(5), axis, served).wait(), int(not serves), (p - 1) * serves
        ),
        "all_to_all": (lambda: comm.all_to_all(torch.full((p,), float(r)), axis, (1,) * p, (1,) * p), p - 1, p - 1),
    }  # fmt: skip
    results = {}
    for name, (call, sent, received) in calls.items():
        axis.comm.clear()
        results[name] = call()
        assert (len(axis.comm.sent), len(axis.comm.received)) == (sent, received)
    assert torch.equal(results["all_gather"], torch.arange(float(p)))
    assert torch.equal(results["reduce_scatter"], torch.full((5 * (r == p - 1),), float(p)))
    assert torch.equal(results["all_to_all"], torch.arange(float(p)))


def test_between_others_that_were_started(axis):
    """Messages of what was started before, large blocks, are still under way."""
    p, r = axis.size, axis.rank
    large, small = torch.full((1, 5000), float(r)), torch.full((1, 3), 10.0 + r)
    works = [comm.all_gather_start(x, axis) for x in (large, small, large + 1, small + 1)]
    for work, first in reversed(list(zip(works, (0.0, 10.0, 1.0, 11.0)))):
        assert torch.equal(work.wait()[:, -1], first + torch.arange(float(p)))
