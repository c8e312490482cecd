"""MPI touches the memory of a tensor on a device only when the work queued on it is done.

Without a device: tensors on a stream of our own making, whose work is done when the stream is synchronised and not
before, as late as a device may do it. Until then a result holds garbage, and MPI would send that.
"""

import pytest
import torch

from hpctrain import Grid, comm
from hpctrain.comm import buffers

pytestmark = pytest.mark.mpi


class Stream:
    def __init__(self):
        self.queued = []

    def synchronize(self):
        for work in self.queued:
            work()
        self.queued.clear()


class Queued(torch.Tensor):
    """A tensor all of whose operations are queued; views of it, shapes and addresses are known at once."""

    stream = Stream()

    @classmethod
    def __torch_function__(cls, function, types, args=(), options=None):
        if function == torch.Tensor.is_cpu.__get__:
            return False
        with torch._C.DisableTorchFunctionSubclass():
            return cls._queue(function, args, options)

    @classmethod
    def _queue(cls, function, args, options):
        queued, plain, options = cls.stream.queued, _plain(args), _plain(options or {})
        name = function.__name__
        if name == "__iadd__" or name.endswith("_") and not name.endswith("__"):  # in place
            queued.append(lambda: function(*plain, **options))
            if name == "copy_" and not all(isinstance(a, cls) for a in args[:2]) and not options.get("non_blocking"):
                cls.stream.synchronize()  # as to and from pageable memory
            return args[0]
        now = function(*plain, **options)
        if isinstance(now, torch.Tensor) and not _memory(now) & set().union(*map(_memory, plain)):
            now.fill_(77)
            queued.append(lambda: now.copy_(function(*plain, **options)))
        return _queued(now)


def _memory(value):
    return {value.untyped_storage().data_ptr()} if isinstance(value, torch.Tensor) else set()


def _queued(result):
    if isinstance(result, torch.Tensor):
        return result.as_subclass(Queued)
    many = isinstance(result, (tuple, list)) and any(isinstance(each, torch.Tensor) for each in result)
    return tuple(map(_queued, result)) if many else result


def _plain(given):
    if isinstance(given, Queued):
        return given.as_subclass(torch.Tensor)
    if type(given) in (tuple, list):
        return type(given)(map(_plain, given))
    return {k: _plain(v) for k, v in given.items()} if isinstance(given, dict) else given


@pytest.fixture(params=["direct", "staged"])
def line(world, request, monkeypatch):
    axis = Grid(tensor=world.size).tensor.x
    axis.transport.cuda_aware = request.param == "direct"
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Queued.stream)
    monkeypatch.setattr(buffers, "pinned_like", lambda t: torch.empty(t.shape, dtype=t.dtype).fill_(99))
    yield axis
    Queued.stream.queued.clear()


def on_device(values):
    """A tensor whose values are queued to be computed."""
    return (values.as_subclass(Queued) * 1).clone()


def read(result):
    Queued.stream.synchronize()
    return result.as_subclass(torch.Tensor)


CALLS = {
    "all_reduce": lambda t, a: comm.all_reduce(t, a),
    "all_reduce_start": lambda t, a: comm.all_reduce_start(t, a).wait(),
    "all_gather": lambda t, a: comm.all_gather(t, a),
    "all_gather_start": lambda t, a: comm.all_gather_start(t, a).wait(),
    "reduce_scatter": lambda t, a: comm.reduce_scatter(t, a),
    "reduce_scatter_start": lambda t, a: comm.reduce_scatter_start(t, a).wait(),
    "all_to_all": lambda t, a: comm.all_to_all(t, a),
    "broadcast": lambda t, a: comm.broadcast(t, a, a.size - 1),
    "broadcast_start": lambda t, a: comm.broadcast_start(t, a, a.size - 1).wait(),
    "gather": lambda t, a: comm.gather(t, a),
    "reduce": lambda t, a: comm.reduce(t, a),
}


@pytest.mark.parametrize("name", CALLS)
def test_results_are_those_of_host_memory(line, name):
    """Beyond the 256 KiB from which sums are exchanged piece by piece, and below; in 32 bits and in 16."""
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (4 * line.size, 100_000 * line.size):
            values = (torch.arange(rows) % 13 + line.rank).to(dtype)
            expected = CALLS[name](values.clone(), line)
            result = CALLS[name](on_device(values), line)
            assert torch.equal(read(result), expected), (name, dtype, rows)


@pytest.mark.ranks(2, 4)
def test_messages(line):
    values = torch.arange(50_000.0)
    if line.rank == 0:
        comm.send(on_device(values), line, 1)
        comm.send_start(on_device(values + 1), line, 1).wait()
    if line.rank == 1:
        for more in range(2):
            out = on_device(torch.zeros(50_000))
            out += 5  # queued on what is to be overwritten
            assert torch.equal(read(comm.recv(out, line, 0)), values + more)


@pytest.mark.parametrize("algorithm", ["naive", "ring", "direct", "rabenseifner", "hierarchical"])
def test_every_algorithm_for_sums(line, algorithm):
    comm.choose_all_reduce(line, algorithm)
    values = torch.arange(1000.0) + line.rank
    expected = torch.arange(1000.0) * line.size + sum(range(line.size))
    for call in (comm.all_reduce, lambda t, a: comm.all_reduce_start(t, a).wait()):
        assert torch.equal(read(call(on_device(values), line)), expected if line.size > 1 else values)


def test_halo(line):
    held = tuple(slice(3 * r, 3 * r + 3) for r in range(line.size))
    needed = tuple(slice(3 * r - 1, 3 * r + 4) for r in range(line.size))
    plan = comm.Halo(line, held, needed, dim=1)
    x = (torch.arange(6.0) + 10 * line.rank).view(2, 3)
    y = plan.exchange(x)
    assert torch.equal(read(plan.exchange(on_device(x))), y)
    assert torch.equal(read(plan.adjoint(on_device(y))), plan.adjoint(y))
