"""Buckets: sums are complete, whatever the bucket size, the order of arrival and the number of uses."""

import gc
import weakref

import pytest
import torch
import torch.utils.checkpoint

from hpctrain import Grid, RngKey, comm
from hpctrain.choices import ALL_REDUCE
from hpctrain.comm.algorithms import reducer
from hpctrain.data_parallel import DataParallel, Zero1, Zero2, Zero3
from hpctrain.layers import Linear, Tokens
from hpctrain.shard import Shard

pytestmark = pytest.mark.mpi


def model(grid, sizes=(6, 50, 6, 6)):
    layers = [
        Linear(grid, a, b, to="inner", key=RngKey(1, f"layer{i}"), dtype=torch.float64)
        for i, (a, b) in enumerate(zip(sizes, sizes[1:]))
    ]
    return torch.nn.ModuleList(layers)


def step(layers, grid, replicas, backwards=1):
    """A loss of this rank's own rows; the gradients by name, after the sum."""
    tokens = Tokens.of(grid, 1, 4)
    replicas.zero_grad()
    for turn in range(backwards):
        if turn == backwards - 1:
            replicas.enable_grad_sync()
        x = torch.arange(24, dtype=torch.float64).reshape(4, 6) / 24 + grid.data.rank + turn
        for layer in layers:
            x = layer(x, tokens).tanh()
        x.sum().backward()
    replicas.finish_grad_sync()
    return {name: p.grad.clone() for name, p in layers.named_parameters()}


def serial(ranks, backwards=1):
    """The same on whole batches."""
    grid = Grid(comm=alone())
    layers = model(grid)
    total = {name: torch.zeros_like(p) for name, p in layers.named_parameters()}
    for rank in range(ranks):
        for turn in range(backwards):
            x = torch.arange(24, dtype=torch.float64).reshape(4, 6) / 24 + rank + turn
            for layer in layers:
                x = torch.nn.functional.linear(x, layer.weight, layer.bias).tanh()
            grads = torch.autograd.grad(x.sum(), list(layers.parameters()))
            for name, grad in zip(total, grads):
                total[name] += grad
    return total


def alone():
    from mpi4py import MPI

    return MPI.COMM_SELF


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("backwards", [1, 3])
@pytest.mark.parametrize("bucket_bytes", [1, 500, 1 << 20])
def test_sums_do_not_depend_on_the_buckets(world, bucket_bytes, backwards, shared):
    """With shared memory and with messages."""
    grid = Grid(data=world.size)
    grid.data.one_node &= shared
    layers = model(grid)
    replicas = DataParallel(layers.parameters(), grid, bucket_bytes=bucket_bytes)
    assert len(replicas.buckets) == {1: 6, 500: 2, 1 << 20: 1}[bucket_bytes]
    for _ in range(2):  # a second step starts afresh
        got = step(layers, grid, replicas, backwards)
    for name, expected in serial(world.size, backwards).items():
        torch.testing.assert_close(got[name], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ALL_REDUCE)
def test_every_algorithm_sums_the_buckets(world, name, monkeypatch):
    monkeypatch.setattr(reducer, "MEASURED", (1024,))
    grid = Grid(data=world.size)
    comm.choose_all_reduce(grid.data, name)
    layers = model(grid)
    replicas = DataParallel(layers.parameters(), grid, bucket_bytes=500)
    for _ in range(2):
        got = step(layers, grid, replicas, 2)
    for parameter, expected in serial(world.size, 2).items():
        torch.testing.assert_close(got[parameter], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["shared", "naive", "direct", "rabenseifner", "hierarchical"])
def test_the_same_bits_for_any_bucket_size(world, name):
    """These add in an order that does not depend on where in a bucket a gradient lies."""
    bits = set()
    for bucket_bytes in (1, 500, 1 << 20):
        grid = Grid(data=world.size)
        comm.choose_all_reduce(grid.data, name)
        layers = model(grid)
        got = step(layers, grid, DataParallel(layers.parameters(), grid, bucket_bytes=bucket_bytes))
        bits.add(torch.cat([gradient.view(-1) for gradient in got.values()]).numpy().tobytes())
    assert len(bits) == 1


def test_buckets_start_in_one_order(world):
    """Gradients that arrive in another order on each rank are still summed with their like."""
    grid = Grid(data=world.size)
    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(4)]
    for parameter in parameters:
        parameter.shard = Shard((3,), (slice(0, 3),))
    replicas = DataParallel(parameters, grid, bucket_bytes=1)
    replicas.zero_grad()
    replicas.enable_grad_sync()
    for i in sorted(range(4), key=lambda i: (i + world.rank) % 4):
        (parameters[i].sum() * (10.0**i)).backward()
    replicas.finish_grad_sync()
    for i, parameter in enumerate(parameters):
        assert torch.equal(parameter.grad, torch.full((3,), world.size * 10.0**i))


@pytest.mark.parametrize("name", ALL_REDUCE)
def test_sums_of_zero2_where_some_ranks_have_no_backward(world, name, monkeypatch):
    """They wait to hear that there is a sum while the others wait in it, whatever algorithm sums over the axis."""
    monkeypatch.setattr(reducer, "MEASURED", (1024,))
    grid = Grid(data=world.size)
    comm.choose_all_reduce(grid.data, name)
    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(4)]
    for parameter in parameters:
        parameter.shard = Shard((3,), (slice(0, 3),))
    replicas = Zero2(parameters, grid, torch.optim.SGD(parameters), bucket_bytes=1)
    for busy in (True, world.rank % 2 == 0):  # after the first step there is memory for sums, and none is waited for
        replicas.zero_grad()
        replicas.enable_grad_sync()
        if busy:
            parameters[-1].sum().backward()
        world.barrier()
        if busy:
            torch.cat(parameters[:-1]).sum().backward()
        replicas.finish_grad_sync()
    _, norm = replicas.loss_and_grad_norm(torch.zeros((), dtype=torch.float64))
    assert norm == pytest.approx(12**0.5 * ((world.size + 1) // 2))


def test_a_parameter_used_nowhere_has_a_zero_gradient(world):
    grid = Grid(data=world.size)
    layers = model(grid)
    replicas = DataParallel(layers.parameters(), grid)
    for parameter in layers.parameters():
        parameter.grad_sync.view.fill_(7.0)  # left from before
    got = step(layers[:1], grid, replicas)
    assert torch.equal(layers[2].weight.grad, torch.zeros(6, 6, dtype=torch.float64))
    assert got["0.weight"].abs().sum() > 0


@pytest.mark.parametrize("kind", [DataParallel, Zero2])
def test_unused_parameters_are_known(world, kind):
    """Unused is what no replica used: with data parallelism the last rank alone uses all layers."""
    grid = Grid(data=world.size)
    layers = model(grid)
    replicas = kind(layers.parameters(), grid, torch.optim.SGD(layers.parameters()))
    everywhere = kind is DataParallel and world.rank == world.size - 1
    replicas.zero_grad()
    x = torch.ones(4, 6, dtype=torch.float64)
    for layer in layers if everywhere else layers[:1]:
        x = layer(x, Tokens.of(grid, 1, 4))
    x.sum().backward()
    replicas.finish_grad_sync()
    names = {p: name for name, p in layers.named_parameters()}
    expected = [] if kind is DataParallel else ["1.weight", "1.bias", "2.weight", "2.bias"]
    assert [names[p] for p in replicas.unused()] == expected


def test_no_sync(world):
    """Three backwards, the last of them outside: the sum of all is the gradient."""
    grid = Grid(data=world.size)
    layers = model(grid)
    replicas = DataParallel(layers.parameters(), grid)
    tokens = Tokens.of(grid, 1, 4)

    def backward(turn):
        x = torch.arange(24, dtype=torch.float64).reshape(4, 6) / 24 + grid.data.rank + turn
        for layer in layers:
            x = layer(x, tokens).tanh()
        x.sum().backward()

    replicas.zero_grad()
    with replicas.no_sync():
        backward(0)
        backward(1)
    backward(2)
    replicas.finish_grad_sync()
    for name, expected in serial(world.size, 3).items():
        torch.testing.assert_close(layers.get_parameter(name).grad, expected, rtol=1e-12, atol=1e-12)


def test_a_layer_used_twice(world):
    """Both products belong to one gradient; the second must not overwrite the first."""
    grid = Grid(data=world.size)
    layer = Linear(grid, 6, 6, to="inner", key=RngKey(1, "twice"), dtype=torch.float64)
    replicas = DataParallel(layer.parameters(), grid)
    got = step(torch.nn.ModuleList([layer, layer]), grid, replicas)
    weight, bias = (p.detach().clone().requires_grad_() for p in (layer.weight, layer.bias))
    for rank in range(world.size):
        x = torch.arange(24, dtype=torch.float64).reshape(4, 6) / 24 + rank
        for _ in range(2):
            x = torch.nn.functional.linear(x, weight, bias).tanh()
        x.sum().backward()
    torch.testing.assert_close(got["0.weight"], weight.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got["0.bias"], bias.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("change", ["none", "twice", "grad", "hook"])
def test_several_backwards(world, change):
    """Gradients of three backwards with one layer used twice, a torch.autograd.grad between them, or hooks, are those
    of torch."""
    grid = Grid(data=world.size)
    layer = Linear(grid, 6, 6, to="inner", key=RngKey(1, "added"), dtype=torch.float64)
    weight, bias = (p.detach().clone().requires_grad_() for p in (layer.weight, layer.bias))
    replicas = DataParallel(layer.parameters(), grid)
    tokens = Tokens.of(grid, 1, 4)
    if change == "hook":
        layer.weight.register_hook(lambda grad: 2 * grad)
        weight.register_hook(lambda grad: 2 * grad)

    def backwards(apply, ranks):
        for turn in range(3):
            for rank in ranks:
                x = torch.arange(24, dtype=torch.float64).reshape(4, 6) / 24 + rank + turn
                x.requires_grad_()
                y = apply(x).tanh()
                if change == "twice":
                    y = apply(y).tanh()
                if change == "grad":
                    torch.autograd.grad(y.sum(), x, retain_graph=True)
                y.sum().backward()

    replicas.zero_grad()
    backwards(lambda x: layer(x, tokens), [world.rank])
    replicas.finish_grad_sync()
    backwards(lambda x: torch.nn.functional.linear(x, weight, bias), range(world.size))
    torch.testing.assert_close(layer.weight.grad, weight.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer.bias.grad, bias.grad, rtol=1e-12, atol=1e-12)
    assert layer.weight.grad.data_ptr() == layer.weight.grad_sync.view.data_ptr()


def test_gradients_are_written_in_place(world):
    """A weight's gradient is computed where it is summed: nothing is copied."""
    grid = Grid(data=world.size)
    layers = model(grid)
    replicas = DataParallel(layers.parameters(), grid)
    where = {}
    for layer in layers:
        layer.weight.register_hook(lambda grad, layer=layer: where.__setitem__(layer, grad.data_ptr()))
    step(layers, grid, replicas)
    assert where == {layer: layer.weight.grad_sync.view.data_ptr() for layer in layers}


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_gradient_that_comes_twice(world, reentrant):
    """As by nested backwards of a module that is used again: its sum may be under way, so that is refused."""
    grid = Grid(data=world.size)
    grid.data.one_node = False
    weight = torch.nn.Parameter(torch.full((3,), 0.5, dtype=torch.float64))
    weight.shard = Shard((3,), (slice(0, 3),))
    replicas = DataParallel([weight], grid)
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    replicas.enable_grad_sync()
    for _ in range(2):
        x = torch.utils.checkpoint.checkpoint(lambda x: x * weight, x, use_reentrant=reentrant)
    if reentrant:
        with pytest.raises(RuntimeError, match=r"of shape \(3,\) came twice .* use use_reentrant=False"):
            x.sum().backward()
    else:
        x.sum().backward()
    replicas.finish_grad_sync()
    assert reentrant or weight.grad.tolist() == [world.size] * 3


@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", [DataParallel, Zero1, Zero2, Zero3])
def test_a_loop_that_forgets_the_gradients_of_its_optimizer(world, make):
    """And not those of the strategy, in whose sums the last gradient would be as well."""
    grid = Grid(data=2)
    layers = model(grid)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    strategy = make(layers if make is Zero3 else layers.parameters(), grid, optimizer)

    def take():
        optimizer.zero_grad()
        for last in (False, True):
            if last:
                strategy.enable_grad_sync()
            layers[0](torch.ones(4, 6, dtype=torch.float64), Tokens.of(grid, 1, 4)).sum().backward()
        strategy.finish_grad_sync()
        _, norm = strategy.loss_and_grad_norm(torch.zeros((), dtype=torch.float64))
        strategy.step(norm, 1.0)

    take()
    before = layers[0].weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"came twice .* or strategy|called twice without strategy\.zero"):
        take()
    assert torch.equal(layers[0].weight, before)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("make", [DataParallel, Zero1, Zero2, Zero3])
def test_dropped_strategies_are_freed(world, make):
    """With the parameters that they wait for, which torch keeps them from if it is given a method of theirs."""
    grid = Grid(data=world.size)
    layers = model(grid)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    strategy = make(layers if make is Zero3 else layers.parameters(), grid, optimizer)
    strategy.enable_grad_sync()
    layers[0](torch.ones(4, 6, dtype=torch.float64), Tokens.of(grid, 1, 4)).sum().backward()
    strategy.finish_grad_sync()
    _, norm = strategy.loss_and_grad_norm(torch.zeros((), dtype=torch.float64))
    strategy.step(norm, 1.0)
    watched = [weakref.ref(strategy), *map(weakref.ref, layers.parameters())]
    del layers, optimizer, strategy
    gc.collect()
    assert [gone() for gone in watched] == [None] * len(watched)


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32, torch.float64), (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize("method", [DataParallel, Zero1, Zero2])
def test_norm_of_gradients_of_several_dtypes(world, method, dtypes):
    """Whichever comes first. Sums of small integers are exact; a norm in bfloat16 would have three digits."""
    grid = Grid(data=world.size)
    parameters = [torch.nn.Parameter(torch.zeros(1000 + i, dtype=dtype)) for i, dtype in enumerate(dtypes)]
    for p in parameters:
        p.shard = Shard.whole(tuple(p.shape))
    gradients = [[(torch.arange(len(p)) * (rank + 3)) % 7 - 3.0 for p in parameters] for rank in range(world.size)]
    replicas = method(parameters, grid, None)
    replicas.zero_grad()
    replicas.enable_grad_sync()
    for p, gradient in zip(parameters, gradients[world.rank]):
        (p * 1).backward(gradient.to(p.dtype))
    replicas.finish_grad_sync()
    _, norm = replicas.loss_and_grad_norm(torch.zeros((), dtype=torch.float64))
    expected = torch.cat([torch.stack(of_ranks).double().sum(0) for of_ranks in zip(*gradients)]).norm().item()
    assert norm == pytest.approx(expected, rel=1e-6)
    assert {*world.allgather(norm)} == {norm}
