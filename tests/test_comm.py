"""Tensors over MPI: types, layouts, large counts, the ledger, non-blocking transfers, errors on one rank."""

import pytest
import torch

from hpctrain import comm
from hpctrain.comm import buffers, functional
from hpctrain.comm.agree import RemoteError

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3, 4, 6)]

MOVED = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32,
         torch.int64, torch.uint8, torch.bool]  # fmt: skip
SUMMED = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8]


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", MOVED)
def test_every_type_is_moved_unchanged(line, dtype):
    mine = torch.tensor([line.rank, 1, 0]).to(dtype)
    expected = torch.tensor([n for r in range(line.size) for n in (r, 1, 0)]).to(dtype)
    assert torch.equal(comm.all_gather(mine, line), expected)
    assert torch.equal(comm.broadcast(mine.clone(), line, root=0), torch.tensor([0, 1, 0]).to(dtype))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", SUMMED)
def test_every_type_is_summed(line, dtype):
    """Also the 16-bit floats, which a plain MPI sum turns to garbage."""
    p = line.size
    mine = torch.full((5,), line.rank + 1).to(dtype)
    expected = torch.full((5,), p * (p + 1) // 2).to(dtype)
    assert torch.equal(comm.all_reduce(mine.clone(), line), expected)
    assert torch.equal(comm.all_reduce_start(mine.clone(), line).wait(), expected)
    rows = mine[:1].repeat(p, 2)
    assert torch.equal(comm.reduce_scatter(rows, line), expected[:2].view(1, 2))
    assert torch.equal(comm.reduce_scatter_start(rows, line).wait(), expected[:2].view(1, 2))


@pytest.mark.ranks(1, 2, 3)
def test_16_bit_sums_are_given_in_another_type(line):
    rows = torch.full((line.size,), 1.0, dtype=torch.bfloat16)
    for total in (
        comm.reduce_scatter(rows, line, dtype=torch.float32),
        comm.reduce_scatter_start(rows, line, dtype=torch.float32).wait(),
    ):
        assert (total.dtype, total.tolist()) == (torch.float32, [line.size])


@pytest.mark.ranks(3, 4, 6)
def test_16_bit_sums_are_rounded_once(line):
    """256 + 1 + 1 + ... in bfloat16 stays 256 when every partial sum is rounded; in float32 it does not."""
    mine = torch.full((4,), 256.0 if line.rank == 0 else 1.0, dtype=torch.bfloat16)
    expected = torch.full((4,), 256.0 + line.size - 1).to(torch.bfloat16)
    assert float(expected[0]) > 256
    assert torch.equal(comm.all_reduce(mine.clone(), line), expected)
    assert torch.equal(comm.reduce_scatter(mine[:1].repeat(line.size), line), expected[:1])


@pytest.mark.ranks(1, 2, 3)
def test_max_and_min(line):
    mine = torch.tensor([line.rank, -line.rank], dtype=torch.float64)
    top = line.size - 1
    assert comm.all_reduce(mine.clone(), line, "max").tolist() == [top, 0]
    assert comm.all_reduce(mine.clone(), line, "min").tolist() == [0, -top]


@pytest.mark.ranks(2, 3, 4, 6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_max_and_min_are_nan_where_one_is(line, dtype):
    """MPI's may drop it, and other ranks' numbers with it; which ones, goes by its algorithm for the length."""
    low, high = torch.tensor([[-2.5, -torch.inf, 0.0, 0.0], [1e-40, torch.inf, 7.0, 0.0]], dtype=dtype).repeat(1, 300)
    for odd in range(line.size):
        mine = (high if line.rank == line.size - 1 else low).clone()
        mine[-1] = -torch.nan if line.rank == odd else line.rank
        for op, expected in (("max", high.clone()), ("min", low.clone())):
            expected[-1] = torch.nan
            for got in (comm.all_reduce(mine.clone(), line, op), comm.all_reduce_start(mine.clone(), line, op).wait()):
                torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.bool])
def test_types_that_cannot_be_summed_are_refused(line, dtype):
    with pytest.raises(ValueError, match=r"cannot take the sum of torch\.\w+ tensors .* use one of float32, float64"):
        comm.all_reduce(torch.zeros(2, dtype=dtype), line)


@pytest.mark.ranks(1, 2)
def test_operations_that_there_are_not(line):
    for all_reduce in (comm.all_reduce, comm.all_reduce_start):
        with pytest.raises(ValueError, match='op must be "sum", "max" or "min", got \'prod\'; .* comm.all_gather'):
            all_reduce(torch.zeros(2), line, op="prod")


@pytest.mark.ranks(2)
def test_types_that_cannot_be_moved_are_refused(line):
    with pytest.raises(ValueError, match=r"tensors of torch\.complex64 cannot be sent; convert it to one of bfloat16"):
        comm.all_gather(torch.zeros(2, dtype=torch.complex64), line)


@pytest.mark.ranks(2, 3, 4, 6)
def test_a_transposed_view_is_sent_in_its_own_order(line):
    """mpi4py alone would accept it and send the memory's order."""
    view = torch.arange(6.0).reshape(2, 3).t() + 10 * line.rank
    view = view.t().contiguous().t()
    assert not view.is_contiguous()
    gathered = comm.all_gather(view, line)
    assert torch.equal(gathered[:3], torch.tensor([[0.0, 3], [1, 4], [2, 5]]))
    assert torch.equal(gathered[3:6], torch.tensor([[10.0, 13], [11, 14], [12, 15]]))
    if line.rank == 0:
        comm.send(view, line, 1)
    if line.rank == 1:
        assert torch.equal(comm.recv(torch.empty(3, 2), line, 0), torch.tensor([[0.0, 3], [1, 4], [2, 5]]))


@pytest.mark.ranks(2)
def test_peers_by_name(line):
    """As in mpi4py; what is wrong leaves nothing behind."""
    if line.rank == 0:
        comm.send(torch.ones(3), line, dest=1, tag=4)
    else:
        assert torch.equal(comm.recv(torch.empty(3), line, tag=4, source=0), torch.ones(3))
    with pytest.raises(TypeError):
        comm.send(torch.ones(3), line)
    assert not line.transport.traffic.timing


@pytest.mark.ranks(2)
def test_writing_into_a_strided_tensor_is_refused(line):
    strided = torch.zeros(4, 4).t()
    for call in (lambda: comm.broadcast(strided[:, :2], line), lambda: comm.all_reduce(strided[:, :2], line)):
        with pytest.raises(ValueError, match=r"shape \(4, 2\) is not contiguous"):
            call()


@pytest.mark.ranks(2, 3, 4, 6)
@pytest.mark.parametrize("limit", [3, 7])
def test_counts_beyond_the_limit(line, limit, monkeypatch):
    """With the limit of 2^31 - 1 made small, every operation still moves every element."""
    monkeypatch.setattr(buffers, "MAX_COUNT", limit)
    buffers.large_datatype.cache_clear()
    p, r = line.size, line.rank
    mine = torch.arange(10.0) + 100 * r
    everyone = torch.cat([torch.arange(10.0) + 100 * q for q in range(p)])
    assert torch.equal(comm.all_gather(mine, line), everyone)
    assert torch.equal(comm.broadcast(mine.clone(), line, root=1), torch.arange(10.0) + 100)
    total = torch.arange(10.0) * p + 100 * (p * (p - 1) / 2)
    assert torch.equal(comm.all_reduce(mine.clone(), line), total)
    assert torch.equal(comm.all_reduce_start(mine.clone(), line).wait(), total)
    assert torch.equal(comm.all_to_all(mine.repeat(p), line), everyone)
    if r == 0:
        comm.send(mine, line, 1)
    if r == 1:
        assert torch.equal(comm.recv(torch.empty(10), line, 0), torch.arange(10.0))
    buffers.large_datatype.cache_clear()


@pytest.mark.ranks(2)
def test_counts_beyond_the_real_limit(world):
    """2^31 + 5 elements between two ranks: more than an MPI count can say. 4 GiB and 5 s."""
    from hpctrain import Grid

    axis = Grid(tensor=2).tensor.x
    count = 2**31 + 5
    if axis.rank == 0:
        large = torch.zeros(count, dtype=torch.uint8)
        large[-3:] = torch.tensor([7, 8, 9])
        comm.send(large, axis, 1)
    else:
        received = comm.recv(torch.ones(count, dtype=torch.uint8), axis, 0)
        assert received[-4:].tolist() == [0, 7, 8, 9]
        assert int(received[: count // 2].max()) == 0


def test_ledger(line):
    """Bytes by hand: 6 float64 a rank gathered; 12 a rank summed; 5 sent round."""
    p = line.size
    line.transport.traffic.clear()
    comm.all_gather(torch.zeros(2, 3, dtype=torch.float64), line)
    comm.all_reduce(torch.zeros(12 * p, dtype=torch.float64), line)
    comm.reduce_scatter(torch.zeros(p, 5), line)
    if p == 1:
        assert line.transport.traffic.table() == {}
        return
    expected = {
        ("x", "all_gather"): {"calls": 1, "sent": 48 * (p - 1), "received": 48 * (p - 1)},
        ("x", "all_reduce"): {"calls": 1, "sent": 192 * (p - 1), "received": 192 * (p - 1)},
        ("x", "reduce_scatter"): {"calls": 1, "sent": 20 * (p - 1), "received": 20 * (p - 1)},
    }
    assert line.transport.traffic.table() == expected


@pytest.mark.ranks(2, 3, 4, 6)
def test_what_is_sent_is_received(line):
    """Over all ranks and uneven operations, as many bytes leave as arrive."""
    line.transport.traffic.clear()
    counts = tuple(r % 3 for r in range(line.size))
    mine = torch.zeros(counts[line.rank], 4)
    comm.all_gather(mine, line, counts)
    comm.all_gather_start(mine, line, counts).wait()
    comm.reduce_scatter(torch.zeros(sum(counts), 4), line, counts)
    comm.reduce_scatter_start(torch.zeros(sum(counts), 4), line, counts).wait()
    comm.gather(mine, line, counts)
    comm.scatter(torch.zeros(sum(counts) if line.rank == 0 else 0, 4), line, counts)
    sent, received = (line.transport.traffic.total(what) for what in ("sent", "received"))
    assert line.comm.allreduce(sent) == line.comm.allreduce(received) > 0


@pytest.mark.ranks(2, 3, 4, 6)
def test_nonblocking_transfers_keep_their_buffers(line):
    """The tensors given are dropped at once; what arrives is right all the same."""
    right, left = (line.rank + 1) % line.size, (line.rank - 1) % line.size
    works = []
    for n in range(20):
        works.append(comm.recv_start(torch.empty(50_000), line, left, tag=n))
        works.append(comm.send_start(torch.full((50_000,), float(line.rank + n)), line, right, tag=n))
        works.append(comm.all_gather_start(torch.full((1000,), float(line.rank)), line))
    results = [work.wait() for work in works]
    for n in range(20):
        assert torch.equal(results[3 * n], torch.full((50_000,), float(left + n)))
        assert torch.equal(results[3 * n + 2][::1000], torch.arange(float(line.size)))


@pytest.mark.ranks(2, 3)
def test_what_nobody_waits_for_keeps_its_memory_until_it_is_there(line, world):
    right, left, n = (line.rank + 1) % line.size, (line.rank - 1) % line.size, 20_000
    for turn in range(3):
        comm.send_start(torch.full((n,), float(turn)), line, right)
    others = [torch.zeros(n) for _ in range(6)]  # where the memory would be free
    assert len(line.transport.unfinished) == 3
    world.barrier()
    for turn in range(3):
        assert torch.equal(comm.recv(torch.empty(n), line, left), others[0] + turn)
    world.barrier()
    comm.recv_start(torch.empty(n), line, left, tag=1)
    comm.send_start(torch.empty(n), line, right, tag=1).wait()
    assert len(line.transport.unfinished) == 1


@pytest.mark.ranks(2, 3, 4, 6)
def test_wrong_counts_are_refused_before_sending(line):
    p, of_own = line.size, f"and that of rank {line.rank} its tensor's [0-9]+ rows, got"
    few, many = torch.zeros(7, 2), torch.zeros(10_000, 2)  # by messages; in shared memory, where there is a choice
    for rows in (few, many):
        for gather in (comm.all_gather, functional.all_gather, comm.gather, functional.gather):
            for counts in ((2,) * p, (len(rows),) * (p - 1)):
                with pytest.raises(ValueError, match=f"counts must be {p} numbers, .* {of_own}"):
                    gather(rows, line, counts)
        for scatter in (
            comm.reduce_scatter, comm.reduce_scatter_start, functional.reduce_scatter, comm.all_to_all,
            *[comm.scatter] * (line.rank == 0),
        ):  # fmt: skip
            for counts in ((len(rows),) * p, (1,) * p, (len(rows),)):
                with pytest.raises(ValueError, match=f"counts must be {p} numbers, .* add up to the tensor's"):
                    scatter(rows, line, counts)
    with pytest.raises(ValueError, match=f"{line.size + 1} rows do not divide evenly over {line.size} ranks"):
        comm.reduce_scatter(torch.zeros(line.size + 1), line)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("name", ["broadcast", "broadcast_start", "reduce", "gather", "scatter"])
def test_roots_that_there_are_not(line, name):
    counts = {"counts": (1,) * line.size} if name == "scatter" else {}
    for root in (-1, line.size):
        with pytest.raises(ValueError, match=f"root must be a rank of .*, from 0 to {line.size - 1}, got {root}"):
            getattr(comm, name)(torch.zeros(line.size), line, root=root, **counts)


def test_an_error_on_one_rank_is_raised_on_all(world):
    culprit = world.size - 1
    with pytest.raises(ValueError, match="bad thing"), comm.together(world):
        if world.rank == culprit:
            raise ValueError("bad thing")
    expected = KeyError if world.rank == culprit else RemoteError
    with pytest.raises(expected, match="surprise"), comm.together(world):
        if world.rank == culprit:
            raise KeyError("surprise")
    with comm.together(world):
        pass
