"""What every way to keep replicas must withstand: frozen weights, one method after another, backwards that fail."""

import contextlib
import math

import pytest
import torch
from torch import nn

import hpctrain as ht
from hpctrain.checkpoint import Checkpointer, TrainingState
from hpctrain.data_parallel import DataParallel, LocalSGD, MixedDataParallel, Precision, Zero1, Zero2, Zero3
from hpctrain.shard import Shard, split

pytestmark = pytest.mark.mpi

X, Y = (torch.linspace(-1, 1, 24 * size, dtype=torch.float64).view(24, size).sin() for size in (5, 3))
KINDS = {"ddp": DataParallel, "zero1": Zero1, "zero2": Zero2, "zero3": Zero3, "local_sgd": LocalSGD}


def network(seed=0, frozen=False):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    model[0].weight.requires_grad_(not frozen)
    return model


def trainer_of(model, grid, kind, lr=0.1, **options):
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr)
    replicas = KINDS[kind](model if kind == "zero3" else parameters, grid, optimizer, **options)
    return ht.Trainer(model, grid, optimizer, loss=loss, strategy=replicas)


def own(grid):
    """This replica's samples."""
    rows = split(len(X), grid.data.size, grid.data.rank)
    return X[rows], Y[rows]


def loss(model, batch):
    return (model(batch[0]) - batch[1]).square().sum() / len(X)


def step(trainer, model, grid):
    return trainer.step([own(grid)])


def serially(model, lr=0.1, steps=1):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr)
    norms = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model, (X, Y)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), math.inf)))
        optimizer.step()
    return norms


def check_weights(model, expected):
    for (name, mine), theirs in zip(model.named_parameters(), expected.parameters()):
        with getattr(mine, "gathered", contextlib.nullcontext()):  # of ZeRO-3
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("second", ["ddp", "zero1", "zero2"])
@pytest.mark.parametrize("first", ["ddp", "zero1", "zero2"])
def test_one_method_after_another(world, first, second):
    """A second trainer of the same model, as after a first phase with fewer weights."""
    grid, expected = ht.Grid(data=world.size), network()
    model = ht.parallelize(network(), grid)
    step(trainer_of(model, grid, first, lr=0.0), model, grid)
    trainer = trainer_of(model, grid, second)
    norms = [step(trainer, model, grid)[1] for _ in range(2)]
    assert norms == pytest.approx(serially(expected, steps=2), rel=1e-12)
    check_weights(model, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_weights_are_saved(world, tmp_path, kind):
    folder, grid = world.bcast(tmp_path), ht.Grid(data=world.size)
    source = ht.parallelize(network(frozen=True), grid)
    trainer = trainer_of(source, grid, kind)
    step(trainer, source, grid)
    state = TrainingState(source, trainer.strategy)
    assert Checkpointer(folder, world, background=False).save(1, state, {}) is None
    target = ht.parallelize(network(seed=1, frozen=True), grid)
    other = trainer_of(target, grid, kind)
    Checkpointer(folder, world).resume(TrainingState(target, other.strategy))
    assert step(trainer, source, grid) == step(other, target, grid)
    assert torch.equal(source[0].weight, target[0].weight)


def test_a_weight_that_was_frozen(world):
    grid = ht.Grid(data=world.size)
    model = ht.parallelize(network(frozen=True), grid)
    trainer = trainer_of(model, grid, "ddp")
    model[0].weight.requires_grad_()
    with pytest.raises(ValueError, match="was frozen when the trainer was made"):
        step(trainer, model, grid)
    model[0].weight.requires_grad_(False)
    step(trainer, model, grid)
    model[0].bias.requires_grad_(False)
    with pytest.raises(ValueError, match="is frozen now, and would still decay"):
        step(trainer, model, grid)


@pytest.mark.each_value(4)
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kind", ["ddp", "zero1", "zero2", "zero3"])
def test_a_step_after_a_backward_that_failed(world, kind, shared):
    """On all ranks alike, when some sums were begun: the next step is as if there had been none."""
    grid, expected = ht.Grid(data=world.size), network()
    grid.data.one_node &= shared
    model = ht.parallelize(network(), grid)
    trainer = trainer_of(model, grid, kind, bucket_bytes=1)

    def fail(_):
        raise RuntimeError("on its way")

    handle = model[0].bias.register_hook(fail)
    with pytest.raises(RuntimeError, match="on its way"):
        step(trainer, model, grid)
    handle.remove()
    norms = [step(trainer, model, grid)[1] for _ in range(2)]
    assert norms == pytest.approx(serially(expected, steps=2), rel=1e-12)
    check_weights(model, expected)


@pytest.mark.parametrize("second", ["ddp", "zero2", "zero3"])
def test_what_an_earlier_method_let_layers_put_off(world, second):
    """Data parallelism sums a weight's gradient over z once a step; what comes after it does not ask for that."""
    grid, expected = ht.Grid(tensor=(1, 1, world.size)), network()
    model = ht.parallelize(network(), grid)
    step(trainer_of(model, grid, "ddp", lr=0.0), model, grid)
    trainer = trainer_of(model, grid, second)
    norms = [step(trainer, model, grid)[1] for _ in range(2)]
    assert norms == pytest.approx(serially(expected, steps=2), rel=1e-12)


def test_weights_in_another_order_of_memory(world):
    """torch's fused optimizers run over memory, and take the gradient to lie as the weight does."""
    grid = ht.Grid(data=world.size)
    start = torch.arange(2 * 3 * 2 * 2, dtype=torch.float64).view(2, 3, 2, 2) / 10
    mine, plain = (nn.Parameter(start.clone().to(memory_format=torch.channels_last)) for _ in range(2))
    mine.shard = Shard(tuple(start.shape), tuple(slice(0, size) for size in start.shape))
    optimizer = torch.optim.AdamW([mine], 0.1, fused=True)
    replicas = DataParallel([mine], grid, optimizer)
    replicas.zero_grad()
    replicas.enable_grad_sync()
    (mine.sin() * start).sum().div(world.size).backward()
    replicas.finish_grad_sync()
    replicas.step(1.0, 0.0)
    (plain.sin() * start).sum().backward()
    torch.optim.AdamW([plain], 0.1, fused=True).step()
    torch.testing.assert_close(mine, plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", [MixedDataParallel, Zero2])
def test_a_loss_in_float16(world, method):
    """Scaled, it is larger than float16 can hold, which is no reason to stop."""
    grid = ht.Grid(data=world.size)
    model = ht.parallelize(network().float(), grid)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    replicas = method(model.parameters(), grid, optimizer, precision=Precision(compute=torch.float16))
    unscaled = lambda model, batch: (model(batch[0]) - batch[1]).square().sum()  # noqa: E731
    trainer = ht.Trainer(model, grid, optimizer, loss=unscaled, strategy=replicas)
    batch = [t.half() for t in own(grid)]
    losses = [trainer.step([batch])[0] for _ in range(3)]
    assert all(map(math.isfinite, losses))


def test_a_rank_without_weights(world):
    """As a stage of a pipeline may have none: its part of every call is to do nothing."""
    grid = ht.Grid(data=world.size)
    optimizer = torch.optim.SGD([{"params": []}], 0.1)
    for replicas in (DataParallel([], grid, optimizer), LocalSGD([], grid, optimizer)):
        replicas.zero_grad()
        replicas.finish_grad_sync()
        replicas.loss_and_grad_norm(torch.zeros((), dtype=torch.float64))
        replicas.step(3.0, 1.0)
