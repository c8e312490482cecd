"""Streams of random collectives against NumPy: sizes, types, operations, blocking and started, messages and windows.

All ranks draw the same examples, of small whole numbers, so that every sum is exact in every type and order.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain import Grid, comm
from hpctrain.comm.workspace import new_workspace

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3, 4)]

TYPES = {
    torch.float32: np.float32, torch.float64: np.float64, torch.bfloat16: np.float32, torch.int64: np.int64,
    torch.uint8: np.uint8,
}  # fmt: skip
ALGORITHMS = ("shared", "mpi", "naive", "ring", "direct", "rabenseifner", "hierarchical")


def values(rank, rows, seed, dtype):
    """What a rank holds: whole numbers below 4."""
    return torch.from_numpy(np.random.default_rng([rank, seed]).integers(0, 4, (rows, 3))).to(dtype)


def numpy(tensor):
    return tensor.to(torch.float32 if tensor.dtype == torch.bfloat16 else tensor.dtype).numpy().copy()


class Case:
    """One operation: its sizes, and what every rank holds."""

    def __init__(self, axis, space, drawn):
        self.axis, self.space, (_, self.dtype, self.base, self.seed) = axis, space, drawn
        generator = np.random.default_rng(self.seed)
        self.counts = tuple(int(n) for n in generator.integers(0, self.base + 1, axis.size))
        self.table = generator.integers(0, self.base + 1, (axis.size, axis.size))
        self.root = int(generator.integers(axis.size))
        self.held = self.counts[axis.rank]
        self.rows = sum(self.counts)
        self.own = slice(sum(self.counts[: axis.rank]), sum(self.counts[: axis.rank + 1]))

    def everyone(self, rows):
        """All ranks' values, as the tensors of this rank and as arrays."""
        all_values = [values(r, rows[r], self.seed, self.dtype) for r in range(self.axis.size)]
        return all_values[self.axis.rank], [numpy(each) for each in all_values]

    def whole(self):
        mine, arrays = self.everyone((self.rows,) * self.axis.size)
        return mine, sum(arrays)

    def all_reduce(self):
        mine, total = self.whole()
        return comm.done(comm.all_reduce(mine, self.axis)), total

    def all_reduce_start(self):
        mine, total = self.whole()
        return comm.all_reduce_start(mine, self.axis), total

    def reduce_scatter(self):
        mine, total = self.whole()
        return comm.done(comm.reduce_scatter(mine, self.axis, self.counts)), total[self.own]

    def reduce_scatter_start(self):
        mine, total = self.whole()
        return comm.reduce_scatter_start(mine, self.axis, self.counts), total[self.own]

    def workspace_reduce(self):
        mine, total = self.whole()
        buffer = self.space.buffer(mine.numel(), mine).copy_(mine.view(-1))
        sums = self.space.reduce(buffer, [3 * count for count in self.counts])
        return comm.done(sums.view(self.held, 3)), total[self.own]

    def all_gather(self):
        mine, arrays = self.everyone(self.counts)
        return comm.done(comm.all_gather(mine, self.axis, self.counts)), np.concatenate(arrays)

    def all_gather_start(self):
        mine, arrays = self.everyone(self.counts)
        return comm.all_gather_start(mine, self.axis, self.counts), np.concatenate(arrays)

    def workspace_gather(self):
        mine, arrays = self.everyone(self.counts)
        return comm.done(self.space.gather(mine, self.counts).clone()), np.concatenate(arrays)

    def all_to_all(self):
        rank = self.axis.rank
        mine, arrays = self.everyone([int(row.sum()) for row in self.table])
        came = comm.all_to_all(mine, self.axis, tuple(map(int, self.table[rank])), tuple(map(int, self.table[:, rank])))
        firsts = [int(row[:rank].sum()) for row in self.table]
        return comm.done(came), np.concatenate(
            [each[first : first + n] for each, first, n in zip(arrays, firsts, self.table[:, rank])]
        )

    def broadcast(self):
        mine, arrays = self.everyone((self.base,) * self.axis.size)
        return comm.done(comm.broadcast(mine, self.axis, self.root)), arrays[self.root]

    def broadcast_start(self):
        mine, arrays = self.everyone((self.base,) * self.axis.size)
        return comm.broadcast_start(mine, self.axis, self.root), arrays[self.root]

    def gather(self):
        mine, arrays = self.everyone(self.counts)
        expected = np.concatenate(arrays) if self.axis.rank == self.root else arrays[0][:0]
        return comm.done(comm.gather(mine, self.axis, self.counts, self.root)), expected

    def scatter(self):
        mine, arrays = self.everyone([self.rows if r == self.root else 0 for r in range(self.axis.size)])
        return comm.done(comm.scatter(mine, self.axis, self.counts, self.root)), arrays[self.root][self.own]


OPERATIONS = [name for name in vars(Case) if not name.startswith("_") and name not in ("everyone", "whole")]
STREAMS = st.lists(
    st.tuples(
        st.sampled_from(OPERATIONS), st.sampled_from(list(TYPES)), st.sampled_from([0, 1, 2, 5, 300, 20_000]),
        st.integers(0, 2**31),
    ),
    min_size=1, max_size=8,
)  # fmt: skip


@pytest.fixture(scope="module")
def axes(world):
    """An axis for each all-reduce, the last one as if its ranks were on nodes of their own."""
    made = {}
    for name in ALGORITHMS:
        made[name] = Grid(tensor=world.size).tensor.x
        if name == "mpi":
            made[name].one_node = world.size == 1
        comm.choose_all_reduce(made[name], name)
    return {name: (axis, new_workspace(axis, torch.empty(0))) for name, axis in made.items()}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(stream=STREAMS)
def test_streams(axes, algorithm, stream):
    """Started operations are waited for at the end, beside one another."""
    under_way = []
    for drawn in stream:
        work, expected = getattr(Case(*axes[algorithm], drawn), drawn[0])()
        under_way.append((drawn, work, expected))
    for drawn, work, expected in under_way:
        result = work.wait()
        assert result.dtype == drawn[1]
        assert np.array_equal(numpy(result), expected.astype(TYPES[drawn[1]])), drawn
