"""Every all-reduce algorithm: sums to rounding, the same bits on all ranks, the bytes of its formula."""

import functools

import pytest
import torch

from hpctrain import Grid, comm
from hpctrain.choices import ALL_REDUCE
from hpctrain.comm.algorithms import reducer

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3, 4, 6)]

SIZES = [0, 1, 7, 1000, 20_011]
# Which ranks share a node, one entry a rank: as it is, all alone, halves, every other one, the last alone.
NODES = {
    "one": lambda r, p: 0,
    "own": lambda r, p: r,
    "halves": lambda r, p: 2 * r // p,
    "alternate": lambda r, p: r % 2,
    "last": lambda r, p: int(r == p - 1),
}
CASES = [(name, "one") for name in ALL_REDUCE] + [("hierarchical", nodes) for nodes in NODES if nodes != "one"]


def axis_with(name, nodes="one", synchronous=False):
    return _axis_with(name, nodes, synchronous)


@functools.cache  # a grid makes several communicators
def _axis_with(name, nodes, synchronous):
    from mpi4py import MPI

    ranks = MPI.COMM_WORLD.size
    axis = Grid(data=ranks).data
    axis.nodes = tuple(NODES[nodes](r, ranks) for r in range(ranks))
    axis.one_node = len(set(axis.nodes)) == 1
    axis.transport.synchronous = synchronous
    comm.choose_all_reduce(axis, name)
    return axis


@pytest.fixture(autouse=True)
def short_table(monkeypatch):
    monkeypatch.setattr(reducer, "MEASURED", (1024, 8192))


def everyones(world, numel, dtype):
    """What each rank gives, known to all."""
    generator = torch.Generator().manual_seed(numel)
    return torch.randn(world.size, numel, generator=generator, dtype=torch.float64).to(dtype)


BY_MESSAGES = [(name, nodes) for name, nodes in CASES if name not in ("auto", "mpi", "shared")]


@pytest.mark.parametrize(
    ("name", "nodes", "synchronous"), [*((*case, False) for case in CASES), *((*case, True) for case in BY_MESSAGES)]
)
def test_sums(world, name, nodes, synchronous):
    axis = axis_with(name, nodes, synchronous)
    for dtype, rtol in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.int64, 0)):
        results = []
        for numel in SIZES:
            given = everyones(world, numel, torch.float64).mul(1000).to(dtype)
            expected = given.double().sum(0).to(dtype)
            for sum_of in (comm.all_reduce, lambda x, axis: comm.all_reduce_start(x, axis).wait()):
                mine = given[world.rank].clone()
                result = sum_of(mine, axis)
                assert result is mine
                torch.testing.assert_close(mine, expected, rtol=rtol, atol=1000 * rtol)
                results.append(mine)
        bits = torch.cat(results).numpy().tobytes()
        assert world.bcast(bits) == bits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "nodes"), CASES)
def test_16_bit_sums_are_rounded_once(world, name, nodes, dtype):
    """Whole numbers of which partial sums are not all representable; float32 has them exactly."""
    axis = axis_with(name, nodes)
    given = torch.arange(101).remainder(17).add(torch.tensor([[2048]] + [[1]] * (world.size - 1))).to(dtype)
    expected = given.float().sum(0).to(dtype)
    assert torch.equal(comm.all_reduce(given[world.rank].clone(), axis), expected)
    assert torch.equal(comm.all_reduce_start(given[world.rank].clone(), axis).wait(), expected)


def rabenseifner_bytes(p, n):
    """Sent by each rank, n bytes that divide evenly."""
    q = 1 << (p.bit_length() - 1)
    works = 2 * (q - 1) * n // q
    joined = 2 * (p - q)
    return [(n if r % 2 == 0 else works + n) if r < joined else works for r in range(p)]


def hierarchical_bytes(nodes, n):
    counts = [nodes.count(node) for node in nodes]
    lanes, groups, sent = min(counts), len(set(nodes)), []
    for r, node in enumerate(nodes):
        lane = 2 * (groups - 1) * (n // lanes) // groups if nodes[:r].count(node) < lanes else 0
        sent.append(2 * (counts[r] - 1) * n // counts[r] + lane)
    return sent


@pytest.mark.ranks(2, 3, 4, 6)
@pytest.mark.parametrize(("name", "nodes"), [case for case in CASES if case[0] != "auto"])
def test_bytes_are_those_of_the_formula(world, name, nodes):
    axis, p = axis_with(name, nodes), world.size
    n = 4 * 840 * 8
    axis.transport.traffic.clear()
    comm.all_reduce(torch.zeros(n // 4), axis)
    best = 2 * (p - 1) * n // p
    sent = {
        "naive": [(p - 1) * n] + [n] * (p - 1),
        "rabenseifner": rabenseifner_bytes(p, n),
        "hierarchical": hierarchical_bytes(axis.nodes, n),
    }.get(name, [best] * p)[world.rank]
    assert axis.transport.traffic.table() == {("data", "all_reduce"): {"calls": 1, "sent": sent, "received": sent}}


@pytest.mark.parametrize("name", ["ring", "direct", "rabenseifner", "naive"])
def test_large_tensors_are_taken_in_pieces(world, name, monkeypatch):
    monkeypatch.setattr(reducer, "SEGMENT", 300)
    given = everyones(world, 1000, torch.float64)
    mine = comm.all_reduce(given[world.rank].clone(), axis_with(name))
    torch.testing.assert_close(mine, given.sum(0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["ring", "direct", "rabenseifner", "naive", "auto"])
def test_many_under_way(world, name):
    """Started in one order, helped along in another on each rank."""
    axis = axis_with(name)
    tensors = [torch.full((1000 * n + 1,), float(world.rank + n)) for n in range(6)]
    works = [comm.all_reduce_start(tensor, axis) for tensor in tensors]
    for turn in range(12):
        works[(turn * (world.rank + 1)) % 6].test()
    p = world.size
    for n, work in enumerate(works):
        assert torch.equal(work.wait(), torch.full((1000 * n + 1,), p * (p - 1) / 2 + p * n))


@pytest.mark.ranks(2)
def test_aliases(world):
    axis = Grid(data=world.size).data
    for alias, name in {"parallel": "direct", "halving": "rabenseifner"}.items():
        comm.choose_all_reduce(axis, alias)
        assert axis.transport.reducers[axis].name == name


@pytest.mark.ranks(2, 3)
def test_all_ranks_choose_one(world):
    """Else each would wait for other messages, or take them for its own."""
    axis = Grid(data=world.size).data
    with pytest.raises(ValueError, match=r"all ranks of data must choose one algorithm, got by rank ring, shared"):
        comm.choose_all_reduce(axis, "shared" if world.rank else "ring")
    assert axis not in axis.transport.reducers


@pytest.mark.ranks(2, 3, 4, 6)
def test_auto_takes_the_fastest_of_its_table_alike_on_all_ranks(world):
    axis = _axis_with.__wrapped__("auto", "one", False)
    reducer = axis.transport.reducers[axis]
    table = reducer.table
    assert world.bcast(table) == table
    for nbytes, times in table.items():
        any_tensor = {name: seconds for name, seconds in times.items() if name not in ("shared", "prepared")}
        assert reducer.for_tensor(nbytes) == reducer.for_tensor(2 * nbytes) == min(any_tensor, key=any_tensor.get)
        assert reducer.for_buffer(nbytes, one_node=True) == min(times, key=times.get)
        assert reducer.for_buffer(nbytes, one_node=False) != "shared"
    assert set(table[1024]) == set(ALL_REDUCE) - {"auto"} | {"prepared"}
    assert axis.transport.traffic.table() == {}


@pytest.mark.ranks(2)
def test_auto_keeps_no_memory_of_what_it_measured(world):
    """And what it chooses makes its own."""
    axis = Grid(data=2).data
    comm.choose_all_reduce(axis, "auto")
    assert axis.transport.resources == []
    axis.transport.reducers[axis].table = {1024: {"hierarchical": 0.0}}
    assert comm.all_reduce(torch.ones(9), axis).tolist() == [2.0] * 9
    assert len(axis.transport.resources) == 1


@pytest.mark.ranks(2, 3, 4, 6)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64, torch.bfloat16])
@pytest.mark.parametrize(("name", "nodes"), CASES)
def test_tensors_made_to_be_summed(world, name, nodes, dtype):
    axis, p = axis_with(name, nodes), world.size
    for numel in (0, 1, p - 1, 1000, 40_001 * p):
        summed = comm.AllReduceBuffer(axis, numel, torch.zeros(1, dtype=dtype))
        axis.transport.traffic.clear()
        for turn, call in enumerate((summed.all_reduce, lambda s=summed: s.all_reduce_start().wait())):
            summed.local.copy_(torch.arange(numel) % 7 + world.rank + turn)
            assert call() is summed.local
            assert torch.equal(summed.local, ((torch.arange(numel) % 7 + turn) * p + p * (p - 1) // 2).to(dtype))
        if dtype != torch.bfloat16:  # of which sums by MPI are two operations
            assert sum(entry["calls"] for entry in axis.transport.traffic.table().values()) == 2 * (numel > 0)


@pytest.mark.ranks(1, 2, 3)
def test_other_operations_stay_with_mpi(world):
    axis = axis_with("ring")
    assert comm.all_reduce(torch.tensor([float(world.rank)]), axis, "max").item() == world.size - 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", [name for name in ALL_REDUCE if name not in ("shared", "auto")])
def test_strided_tensors_are_refused(world, name):
    axis = axis_with(name)
    with pytest.raises(ValueError, match=r"shape \(4, 2\) is not contiguous"):
        comm.all_reduce(torch.zeros(4, 4).t()[:, :2], axis)


@pytest.mark.ranks(1, 2)
def test_unknown_names_are_refused(world):
    with pytest.raises(ValueError, match='comm.all_reduce must be "shared" or "mpi" or .* or "auto", got .tree.'):
        axis_with("tree")
