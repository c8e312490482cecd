"""What every way to keep replicas must withstand: frozen weights, one method after another, backwards that fail."""

import contextlib
import math

import pytest
import torch
from experts_checks import mixture
from torch import nn

import hpctrain as ht
from hpctrain.checkpoint import Checkpointer, TrainingState
from hpctrain.comm import Work
from hpctrain.data_parallel import DataParallel, LocalSGD, MixedDataParallel, Precision, Zero1, Zero2, Zero3
from hpctrain.shard import Shard, split
from hpctrain.train.optimizer import make_optimizer

pytestmark = pytest.mark.mpi

X, Y = (torch.linspace(-1, 1, 24 * size, dtype=torch.float64).view(24, size).sin() for size in (5, 3))
KINDS = {"ddp": DataParallel, "zero1": Zero1, "zero2": Zero2, "zero3": Zero3, "local_sgd": LocalSGD}


def network(seed=0, frozen=False):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    model[0].weight.requires_grad_(not frozen)
    return model


def trainer_of(model, grid, kind, lr=0.1, given="trained", optimizer=torch.optim.AdamW, **options):
    parameters = [p for p in model.parameters() if p.requires_grad or given == "all"]
    optimizer = optimizer(parameters, lr)
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


def serially(model, lr=0.1, steps=1, optimizer=torch.optim.AdamW):
    optimizer = optimizer([p for p in model.parameters() if p.requires_grad], lr)
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


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_module_is_refused(world, kind):
    model = network()
    with pytest.raises(ValueError, match=r"got 4 weights of a plain module, .* call model = ht.parallelize"):
        trainer_of(model, ht.Grid(data=2), kind)


@pytest.mark.parametrize("second", ["ddp", "zero1", "zero2"])
@pytest.mark.parametrize("first", ["ddp", "zero1", "zero2", "local_sgd"])
def test_two_methods_in_turn_are_refused(world, first, second):
    """The gradients lie in the buckets of the second: the first would sum its own, of an earlier step."""
    grid = ht.Grid(data=world.size)
    model = ht.parallelize(network(), grid)
    trainers = [trainer_of(model, grid, kind) for kind in (first, second)]
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=f"{KINDS[first].__name__} was given weights that a later strategy has now"):
        step(trainers[0], model, grid)
    assert all(map(torch.equal, before, model.parameters()))
    step(trainers[1], model, grid)


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_of_other_weights_is_refused(world, kind):
    """Alike where some ranks hold none of them, as of those that an earlier ZeRO gave to the optimizer."""
    grid = ht.Grid(data=world.size)
    models = [ht.parallelize(network(), grid) for _ in range(2)]
    optimizer = torch.optim.AdamW(models[0].parameters(), 0.1)

    def make(model):
        return KINDS[kind](model if kind == "zero3" else model.parameters(), grid, optimizer)

    with pytest.raises(ValueError, match="an optimizer over 4 weights that are not among its parameters"):
        make(models[1])
    make(models[0])
    if kind.startswith("zero"):
        with pytest.raises(ValueError, match=r"an optimizer over \d+ weights .* make a new optimizer"):
            make(models[0])


@pytest.mark.ranks(4)
def test_an_optimizer_that_has_no_part_of_the_weights_on_some_ranks(world):
    grid = ht.Grid(data=4)
    weight = nn.Parameter(torch.ones(1))
    weight.shard = Shard((1,), (slice(0, 1),))
    optimizer = torch.optim.SGD([weight], 0.1)
    Zero1([weight], grid, optimizer)
    with pytest.raises(ValueError, match="an optimizer over 1 weights"):
        Zero1([weight], grid, optimizer)


@pytest.mark.parametrize("kind", ["ddp", "zero1", "zero2", "zero3", "in the loop"])
def test_two_models_under_one_loss(world, kind):
    """The sum of a bucket of one is under way while backward goes through the other, whose buckets are larger too."""
    grid, expected = ht.Grid(data=world.size), pair_of(7, 40)
    first, second = models = pair_of(7, 40)
    if kind == "in the loop":
        first, second = (ht.parallelize(model, grid, zero=2) for model in models)
        steps = [torch.optim.SGD(model.parameters(), 0.1) for model in (first, second)]
    else:
        first, second = (ht.parallelize(model, grid) for model in models)
        steps = [torch.optim.SGD(model.parameters(), 0.1) for model in (first, second)]
        strategies = [
            KINDS[kind](model if kind == "zero3" else model.parameters(), grid, optimizer, bucket_bytes=1)
            for model, optimizer in zip((first, second), steps)
        ]
    rows = split(len(X), world.size, world.rank)
    for _ in range(2):
        total = (second(first(X[rows])) - Y[rows]).square()
        if kind == "in the loop":
            (total.sum() * world.size / len(X)).backward()
            for optimizer in steps:
                optimizer.step()
                optimizer.zero_grad()
            continue
        for replicas in strategies:
            replicas.zero_grad()
            replicas.enable_grad_sync()
        (total.sum() / len(X)).backward()
        for replicas in strategies:
            replicas.finish_grad_sync()
        for replicas in strategies:
            _, norm = replicas.loss_and_grad_norm(torch.zeros((), dtype=torch.float64))
            replicas.step(norm, 0.0)
    serial = torch.optim.SGD([p for model in expected for p in model.parameters()], 0.1)
    for _ in range(2):
        serial.zero_grad()
        (expected[1](expected[0](X)) - Y).square().sum().div(len(X)).backward()
        serial.step()
    for model, theirs in zip((first, second), expected):
        check_weights(model, theirs)


def pair_of(*sizes):
    """Two networks, one behind the other."""
    torch.manual_seed(0)
    layers = [[nn.Linear(5, size), nn.Tanh(), nn.Linear(size, 5)] for size in sizes]
    layers[1][2] = nn.Linear(sizes[1], 3)
    return [nn.Sequential(*each).double() for each in layers]


@pytest.mark.parametrize("given", ["trained", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_frozen_weights_are_saved(world, tmp_path, kind, given):
    """And neither decay nor get a gradient, where the strategy and the optimizer are given them too."""
    folder, grid = world.bcast(tmp_path), ht.Grid(data=world.size)
    source = ht.parallelize(network(frozen=True), grid)
    trainer = trainer_of(source, grid, kind, given=given)
    step(trainer, source, grid)
    assert source[0].weight.grad is None
    assert torch.equal(source[0].weight, network()[0].weight)
    state = TrainingState(source, trainer.strategy)
    assert Checkpointer(folder, world, background=False).save(1, state, {}) is None
    target = ht.parallelize(network(seed=1, frozen=True), grid)
    other = trainer_of(target, grid, kind)
    Checkpointer(folder, world).resume(TrainingState(target, other.strategy))
    assert step(trainer, source, grid) == step(other, target, grid)
    assert torch.equal(source[0].weight, target[0].weight)


@pytest.mark.parametrize("kind", [MixedDataParallel, Zero1, Zero2])
def test_biases_of_routers_beside_weights_in_bfloat16(world, kind):
    """They are changed by the load of the experts alone, in steps that bfloat16 would round."""
    grid, rate = ht.Grid(data=world.size), 2.0**-10
    layer = mixture(grid, torch.ones(5), scores="sigmoid", balance_bias=rate)
    optimizer = torch.optim.AdamW(layer.parameters(), 0.1)
    replicas = kind(layer.parameters(), grid, optimizer, precision=Precision(compute=torch.bfloat16))
    tokens = ht.layers.Tokens.of(grid, 1, 5, grid.data.rank)
    x = torch.linspace(-1, 1, 35).view(5, 7).sin().bfloat16()
    trainer = ht.Trainer(
        layer, grid, optimizer, loss=lambda layer, x: layer(x, tokens).float().square().sum(), strategy=replicas
    )
    trainer.step([x])
    changed = (layer.router.bias - 1) / rate
    assert {*changed.tolist()} <= {-1.0, 0.0, 1.0}
    assert changed.any()
    trainer.step([x])
    assert {*((layer.router.bias - 1) / rate - changed).tolist()} <= {-1.0, 0.0, 1.0}


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

    handle = torch.Tensor.register_hook(model[0].bias, fail)  # the parameter's own refuses hooks of one replica
    with pytest.raises(RuntimeError, match="on its way"):
        step(trainer, model, grid)
    handle.remove()
    norms = [step(trainer, model, grid)[1] for _ in range(2)]
    assert norms == pytest.approx(serially(expected, steps=2), rel=1e-12)
    check_weights(model, expected)


@pytest.mark.parametrize("kind", ["ddp", "zero1", "zero2"])
def test_another_method_after_a_backward_that_failed(world, monkeypatch, kind):
    """It waits for the sums that were begun."""
    grid, waited, wait = ht.Grid(data=world.size), [], Work.wait
    grid.data.one_node = False
    model = ht.parallelize(network(), grid)
    trainer = trainer_of(model, grid, kind, bucket_bytes=1)

    def fail(_):
        raise RuntimeError("on its way")

    torch.Tensor.register_hook(model[0].bias, fail)
    with pytest.raises(RuntimeError, match="on its way"):
        step(trainer, model, grid)
    buckets = trainer.strategy.buckets
    under_way = [bucket.work for bucket in buckets if kind != "zero2" or bucket is trainer.strategy._summing]
    monkeypatch.setattr(Work, "wait", lambda self: waited.append(self) or wait(self))
    trainer_of(model, grid, "ddp")
    assert under_way
    assert all(any(work is each for each in waited) for work in under_way)


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


@pytest.mark.parametrize("averaged", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_an_evaluation_that_fails(world, kind, averaged):
    """The optimizer's weights are again those of the training, neither their moving average nor that of replicas."""
    grid = ht.Grid(data=world.size)
    model = ht.parallelize(network(), grid)
    optimizer = make_optimizer(model.parameters(), 0.1, ema_decay=0.5)
    options = {"every": 0} if kind == "local_sgd" else {}
    replicas = KINDS[kind](model if kind == "zero3" else model.parameters(), grid, optimizer, **options)
    trainer = ht.Trainer(model, grid, optimizer, loss=loss, strategy=replicas)
    for _ in range(2):
        step(trainer, model, grid)
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    before = [p.detach().clone() for p in weights]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        trainer.evaluate([[own(grid)], [(X[:, :3], Y)]], averaged=averaged)
    assert all(map(torch.equal, before, weights))


@pytest.mark.ranks(2)
def test_an_evaluation_of_more_batches_on_one_replica(world):
    """By messages ZeRO-3 refuses it on all ranks: one would gather weights when the other adds up the loss."""
    grid = ht.Grid(data=2)
    grid.data.one_node = False
    model = ht.parallelize(network(), grid)
    trainer = trainer_of(model, grid, "zero3")
    said = "replica 0 comes to the end of an evaluation, replica 1 comes to the forward of"
    with pytest.raises(ValueError, match=said):
        trainer.evaluate([[own(grid)]] * (1 + world.rank))
    assert trainer.evaluate([[own(grid)]]) == pytest.approx(loss(network(), (X, Y)).item(), rel=1e-12)


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
