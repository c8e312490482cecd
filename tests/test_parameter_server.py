"""Parameter servers: synchronous ones equal a serial program, others apply every push and wait for the slow."""

import dataclasses
import time
from types import SimpleNamespace

import pytest
import torch
from training_checks import UNEVEN, batches, fitting, in_turn, microbatches, serial

from hpctrain import Grid, RngKey
from hpctrain.checkpoint import Checkpointer, TrainingState, folder, load, save
from hpctrain.data_parallel import AsyncParameterServer, DataParallel, ParameterServer
from hpctrain.layers.whole_parameters import whole_parameters
from hpctrain.models.gpt2 import GPT2
from hpctrain.shard import Shard
from hpctrain.train.optimizer import make_optimizer
from hpctrain.train.trainer import Trainer

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 4, 8)]
SEVERAL = pytest.mark.ranks(4, 8)  # servers, of which two ranks would leave no worker


def gpt2(grid, make, shape, clip, count=1):
    model = GPT2(grid, shape, key=RngKey(3), dtype=torch.float64)
    optimizer = make_optimizer(model.parameters(), 0.1)
    method = make(list(model.parameters()), grid, optimizer)
    for group in optimizer.param_groups:
        group["lr"] = 1e-2
    return model, Trainer(model, grid, optimizer, count, max_norm=clip, strategy=method)


@pytest.mark.ranks(2, 4, 8)
@pytest.mark.parametrize(
    ("servers", "bucket_bytes", "clip", "synchronous"),
    [
        (1, 4 << 20, 1.0, False),
        (1, 1, 0.0, True),
        pytest.param(2, 5000, 1.0, True, marks=SEVERAL),
        pytest.param(3, 1, 0.3, False, marks=SEVERAL),
    ],
)
def test_synchronous_servers_equal_a_serial_program(world, servers, bucket_bytes, clip, synchronous):
    grid, shape = Grid(data=world.size), fitting(UNEVEN, 1)
    grid.transport.synchronous = synchronous
    model, training = gpt2(grid, lambda *given: ParameterServer(*given, servers, bucket_bytes), shape, clip)
    results = [training.step(microbatches(grid, x, n, 1, idle=servers)) for n, x in enumerate(batches(shape))]
    weights, losses, norms = serial(shape, clip)
    assert [loss for loss, _ in results] == pytest.approx(losses, rel=1e-12)
    assert [norm for _, norm in results] == pytest.approx(norms, rel=1e-11)
    for name, parameter in model.named_parameters():  # on servers and workers alike
        torch.testing.assert_close(parameter, weights[name], rtol=1e-10, atol=1e-12)


GRIDS = {
    2: [(2, 1, 1)],
    4: [(2, 2, 1), (2, 1, (2, 1, 1)), (2, 1, (1, 2, 1)), (2, 1, (1, 1, 2))],
    6: [(3, 2, 1), (2, 1, (1, 3, 1))],
    8: [(2, 2, 2), (4, 2, 1), (2, 1, (1, 2, 2))],
}


@pytest.mark.ranks(*GRIDS)
@pytest.mark.parametrize(("count", "clip", "tied"), [(1, 0.0, True), (3, 0.3, False), (2, 1.0, True)])
def test_servers_on_other_axes(world, case, count, clip, tied):
    """A place on the data axis is a whole replica, whose ranks all serve or all work."""
    for data, pipeline, tensor in in_turn(GRIDS, world.size, case):
        grid, shape = Grid(data, pipeline, tensor), fitting(dataclasses.replace(UNEVEN, tied=tied), pipeline)
        model, training = gpt2(grid, lambda *given: ParameterServer(*given, 1, 2000), shape, clip, count)
        results = [training.step(microbatches(grid, x, n, count, idle=1)) for n, x in enumerate(batches(shape))]
        weights, losses, norms = serial(shape, clip)
        assert [loss for loss, _ in results] == pytest.approx(losses, rel=1e-12)
        assert [norm for _, norm in results] == pytest.approx(norms, rel=1e-11)
        for name, whole in whole_parameters(model, grid):
            if grid.rank == 0:
                torch.testing.assert_close(whole, weights[name], rtol=1e-10, atol=1e-12)


@pytest.mark.ranks(2, 4, 8)
def test_a_worker_sends_and_receives_the_model_once(world):
    grid, shape = Grid(data=world.size), dataclasses.replace(UNEVEN, layers=1)
    model, training = gpt2(grid, ParameterServer, shape, 1.0)
    batch = microbatches(grid, batches(shape)[0], 0, 1, idle=1)
    grid.transport.traffic.clear()
    training.step(batch)
    size, table = sum(p.nbytes for p in model.parameters()), grid.transport.traffic.table()
    moved = {name: table["data", name] for name in ("reduce_scatter", "all_gather")}
    workers = world.size - 1
    expected = (0, size * workers, size * workers, 0) if grid.data.rank == workers else (size, 0, 0, size)
    got = [moved[name][way] for name in ("reduce_scatter", "all_gather") for way in ("sent", "received")]
    assert tuple(got) == expected


def line(grid, make, values, loss, lr=0.5, max_norm=0.0):
    """A trainer of one parameter."""
    parameter = torch.nn.Parameter(torch.tensor(values, dtype=torch.float64))
    parameter.shard = Shard(tuple(parameter.shape), (slice(0, len(values)),))
    model = torch.nn.ParameterList([parameter])
    optimizer = torch.optim.SGD([parameter], lr=lr, momentum=0.5 if max_norm else 0.0)
    strategy = make([parameter], grid, optimizer)
    training = Trainer(model, grid, optimizer, loss=loss, max_norm=max_norm, strategy=strategy)
    return parameter, lambda number: training.step([] if strategy.serves else [number]), training


@pytest.mark.ranks(2, 4, 8)
@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("servers", [1, pytest.param(2, marks=SEVERAL)])
def test_every_push_is_applied_once(world, servers, staleness, synchronous):
    """Of a loss that is linear in the weights the updates may come in any order: the sum is exact."""
    grid, workers, steps = Grid(data=world.size), world.size - servers, 10
    grid.transport.synchronous = synchronous
    slope = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64) * (grid.data.rank + 1)
    parameter, take, training = line(
        grid, lambda *given: AsyncParameterServer(*given, servers, staleness), [0.0, 1.0, 2.0],
        lambda model, number: (model[0] * slope).sum(),
    )  # fmt: skip
    for number in range(steps):
        take(number)
    with training.strategy.full_weights():
        moved = 0.5 * steps * (workers * (workers + 1) // 2)
        expected = torch.tensor([0.0, 1.0, 2.0]).double() - moved * torch.tensor([1.0, 2.0, 4.0]).double()
        assert torch.equal(parameter.detach(), expected)
    counts = world.bcast(training.strategy.report()["staleness"], world.size - servers)
    assert sum(counts) == workers * steps
    assert len(counts) == (workers - 1) * (2 * staleness + 1) + 1


@pytest.mark.ranks(2, 4, 8)
@pytest.mark.parametrize("max_norm", [0.0, 2.0])
def test_one_worker_is_the_serial_run(world, max_norm):
    grid = Grid(data=world.size)
    parameter, take, training = line(
        grid, lambda *given: AsyncParameterServer(*given, world.size - 1, 3), [3.0, -1.0, 2.0, 0.5],
        lambda model, number: (model[0] - number).square().sum(), 0.1, max_norm,
    )  # fmt: skip
    alone = torch.nn.Parameter(torch.tensor([3.0, -1.0, 2.0, 0.5], dtype=torch.float64))
    optimizer = torch.optim.SGD([alone], lr=0.1, momentum=0.5 if max_norm else 0.0)
    for number in range(6):
        got = take(number)
        optimizer.zero_grad()
        loss = (alone - number).square().sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_([alone], max_norm or float("inf"))
        optimizer.step()
        assert training.strategy.serves or got == pytest.approx((loss.item(), norm.item()), rel=1e-14)
    with training.strategy.full_weights():
        torch.testing.assert_close(parameter, alone, rtol=1e-14, atol=0)


@pytest.mark.ranks(4)
def test_a_later_method_has_the_updates_by_all_workers(world):
    grid, slope = Grid(data=4), torch.tensor([1.0, 2.0], dtype=torch.float64)
    parameter, take, _ = line(grid, AsyncParameterServer, [0.0, 1.0], lambda model, number: (model[0] * slope).sum())
    for number in range(5):
        take(number)
    DataParallel([parameter], grid)
    assert parameter.tolist() == [-0.5 * 5 * 3, 1 - 0.5 * 5 * 3 * 2]


@pytest.mark.ranks(4, 8)
@pytest.mark.parametrize("staleness", [0, 2])
def test_nobody_is_too_far_ahead_of_the_slowest(world, staleness):
    """Worker 0 sleeps before every push; the time of day tells who waited for whom."""
    grid, steps = Grid(data=world.size), 6
    pushing = []

    def loss(model, number):
        time.sleep(0.04 if grid.data.rank == 0 else 0)
        pushing.append(time.monotonic())
        return model[0].sum()

    _, take, _ = line(grid, lambda *given: AsyncParameterServer(*given, 1, staleness), [0.0], loss)
    answered = []
    world.Barrier()
    for number in range(steps):
        take(number)
        answered.append(time.monotonic())
    slow = world.bcast(pushing, 0)
    if 0 < grid.data.rank < world.size - 1:
        for number in range(staleness, steps):
            assert answered[number] > slow[number - staleness]
        if staleness:
            assert answered[0] < slow[1]  # it did not wait


@pytest.mark.ranks(2)
def test_a_server_s_waiting_for_pushes_is_communication(world):
    """Noted as such, and watched."""
    grid = Grid(data=2)

    def loss(model, number):
        time.sleep(0.2)
        return model[0].sum()

    _, take, training = line(grid, AsyncParameterServer, [0.0], loss)
    begun = []
    watchdog = SimpleNamespace(begin=lambda axis, name, peer: begun.append(name), end=lambda: None)
    grid.transport.watchdog = watchdog
    take(0)
    grid.transport.watchdog = None
    assert ("probe" in begun) == training.strategy.serves
    assert (grid.transport.traffic.seconds().get(("data", "probe"), 0) > 0.1) == training.strategy.serves


@pytest.mark.ranks(4)
def test_what_was_loaded_lacks_no_updates(world, tmp_path):
    """Workers push in turn: the first lacks none, the second one by the first, the third two."""
    root, grid = world.bcast(tmp_path), Grid(data=4)
    _, take, training = line(grid, AsyncParameterServer, [0.0], lambda model, number: model[0].sum())
    before = training.strategy.report()["staleness"]
    for step in range(3):
        if 0 < world.rank < 3:
            world.recv(source=world.rank - 1)
        take(step)
        if world.rank < 2:
            world.send(None, world.rank + 1)
        after = world.bcast(training.strategy.report()["staleness"], 3)
        assert [new - old for new, old in zip(after, before)] == [1, 1, 1, 0, 0, 0, 0]
        before = after
        save(root, step, training.model, training.strategy)
        assert load(root, training.model, training.strategy).step == step


@pytest.mark.ranks(2, 4, 8)
def test_what_is_not_finite_is_never_pushed(world):
    grid = Grid(data=world.size)
    _, _, training = line(grid, AsyncParameterServer, [0.0], lambda model, number: model[0].sum())
    training.strategy.zero_grad()
    if not training.strategy.serves:
        worker = grid.data.rank
        with pytest.raises(FloatingPointError, match=f"loss nan .* of worker {worker} are not both finite; use"):
            training.strategy.loss_and_grad_norm(torch.tensor(float("nan"), dtype=torch.float64))


@pytest.mark.ranks(2, 4, 8)
@pytest.mark.parametrize("staleness", [None, 2])
def test_a_save_that_fails_on_the_first_rank_changes_nothing(world, tmp_path, staleness):
    """Saving moves no tensor, so that a rank that cannot save leaves none waiting, nor keeps older weights. With one
    worker the asynchronous servers are exact too; a frozen weight is saved once."""
    root, grid = world.bcast(tmp_path), Grid(data=world.size)
    servers, wanted = (1, {}) if staleness is None else (world.size - 1, {"staleness": staleness})
    made = ParameterServer if staleness is None else AsyncParameterServer
    parameter, take, training = line(
        grid, lambda *given: made(*given, servers, **wanted), [3.0, -1.0, 2.0, 0.5],
        lambda model, number: (model[0] - 1).square().sum() / (world.size - servers), 0.25,
    )  # fmt: skip
    frozen = torch.nn.Parameter(torch.tensor([7.0, 8.0]), requires_grad=False)
    frozen.shard = Shard((2,), (slice(0, 2),))
    state = TrainingState(torch.nn.ParameterList([parameter, frozen]), training.strategy)
    take(0)
    grid.transport.traffic.clear()
    saver = Checkpointer(root, grid.comm, background=False)
    error = saver.save(1, state, {})
    moved = [name for axis, name in grid.transport.traffic.table() if axis == "data"]
    assert world.allgather((error, moved)) == [(None, [])] * world.size

    if world.rank == 0:
        (root / "step-2").write_text("in the way")
    error = saver.save(2, state, {})
    assert f"{folder.place(root, 2)} exists already" in error
    take(1)
    with training.strategy.full_weights():  # halfway to 1 in each step
        assert parameter.tolist() == [1.5, 0.5, 1.25, 0.875]

    with torch.no_grad():
        parameter.zero_(), frozen.zero_()
    if world.rank == 0:
        (root / "step-2").unlink()
    world.Barrier()
    assert Checkpointer(root, grid.comm).resume(state).step == 1
    assert (parameter.tolist(), frozen.tolist()) == ([2.0, 0.0, 1.5, 0.75], [7.0, 8.0])


@pytest.mark.ranks(1, 2, 4)
def test_refusals(world):
    with pytest.raises(ValueError, match=f"leave a worker: at least 1 and below grid.data = {world.size}, got"):
        line(Grid(data=world.size), lambda *given: ParameterServer(*given, world.size), [0.0], None)
    for staleness in (-1, 0.5):
        with pytest.raises(ValueError, match=f"staleness must be a whole number of steps, at least 0, got {staleness}"):
            line(Grid(data=world.size), lambda *given, s=staleness: AsyncParameterServer(*given, 1, s), [0.0], None)
    if world.size > 1:
        with pytest.raises(ValueError, match="needs grid.pipeline = 1 and grid.tensor = 1, got 1 and"):
            line(Grid(tensor=world.size), AsyncParameterServer, [0.0], None)
