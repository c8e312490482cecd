"""ZeRO: training equals the serial program's, with state, gradients and weights spread over the replicas."""

import contextlib
import dataclasses
import functools
import gc

import pytest
import torch
from torch._subclasses import FakeTensor
from training_checks import UNEVEN, batches, by_messages, check_equal, fitting, in_turn, microbatches, serial

from hpctrain import Grid, RngKey
from hpctrain.data_parallel import MixedDataParallel, Precision, Zero1, Zero2, Zero3
from hpctrain.layers.whole_parameters import whole_parameters
from hpctrain.models.gpt2 import GPT2
from hpctrain.shard import Shard
from hpctrain.shard_entries import Described
from hpctrain.train.optimizer import adamw
from hpctrain.train.trainer import Trainer

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 4, 8)]

SMALL = fitting(UNEVEN, 1)
METHODS = {"zero1": Zero1, "zero2": Zero2, "zero3": Zero3}
GRIDS = {
    1: [(1, 1, 1)],
    2: [(2, 1, 1)],
    3: [(3, 1, 1)],
    4: [(2, 2, 1), (4, 1, 1), (2, 1, (2, 1, 1)), (2, 1, (1, 2, 1)), (2, 1, (1, 1, 2))],
    6: [(3, 2, 1), (2, 1, (1, 3, 1))],
    8: [(2, 2, 2), (2, 1, (1, 2, 2)), (4, 2, 1)],
}


def made(method, model, *arguments, **options):
    kind = (METHODS | {"ddp": MixedDataParallel})[method]
    return kind(model if method == "zero3" else model.parameters(), *arguments, **options)


def trained(method, grid, shape, count, clip, bucket_bytes=20_000, dtype=torch.float64, **how):
    model = GPT2(grid, shape, key=RngKey(3), dtype=dtype)
    optimizer = adamw(model.parameters(), 0.1)
    replicas = made(method, model, grid, optimizer, bucket_bytes, **how)
    trainer = Trainer(model, grid, optimizer, count, max_norm=clip, strategy=replicas)
    for group in optimizer.param_groups:
        group["lr"] = 1e-2
    got = [trainer.step(microbatches(grid, batch, step, count)) for step, batch in enumerate(batches(shape))]
    return model, replicas, got


@pytest.mark.ranks(*GRIDS)
@pytest.mark.parametrize(
    ("change", "count", "clip", "messages", "grids"),
    [
        ({}, 2, 1.0, False, 5),
        ({"tied": False, "dropout": 0.3}, 3, 0.3, True, 2),
        ({"heads": 1, "width": 5, "vocabulary": 3}, 1, 0.0, False, 1),
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_equals_one_rank(world, case, method, change, count, clip, messages, grids):
    """Losses, norms and weights of two steps."""
    shape = dataclasses.replace(UNEVEN, **change)
    places = {ranks: found[:grids] for ranks, found in GRIDS.items()}
    for data, pipeline, tensor in in_turn(places, world.size, case):
        grid = Grid(data, pipeline, tensor)
        if messages:
            by_messages(grid)
        model, replicas, got = trained(method, grid, fitting(shape, pipeline), count, clip)
        check_equal(got, replicas, model, grid, serial(fitting(shape, pipeline), clip))


OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, momentum=0.9, nesterov=True),
    "amsgrad": functools.partial(torch.optim.Adam, amsgrad=True),
    "rmsprop": functools.partial(torch.optim.RMSprop, centered=True),
    "adagrad": torch.optim.Adagrad,
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("method", METHODS)
def test_any_element_wise_optimizer(world, method, optimizer):
    """Two groups of options; parameters of sizes that no number of ranks divides, one of them empty."""
    sizes = [5, 0, 1, 12]
    grid = Grid(data=world.size)

    def initial():
        parameters = [torch.nn.Parameter(torch.arange(1.0, n + 1, dtype=torch.float64)) for n in sizes]
        for p in parameters:
            p.shard = Shard((len(p),), (slice(0, len(p)),))
        groups = [{"params": parameters[:2], "lr": 0.1}, {"params": parameters[2:], "lr": 0.3, "weight_decay": 0.05}]
        return parameters, OPTIMIZERS[optimizer](groups)

    parameters, steps = initial()
    model = Sum(parameters, lambda p, number: ((p * number).sin() / p.abs()).sum())
    replicas = made(method, model, grid, steps, bucket_bytes=40)
    expected, serially = initial()
    reference = Sum(expected, model.term)
    for step in range(3):
        replicas.zero_grad()
        model(grid.data.rank + step + 1).backward()
        replicas.enable_grad_sync()
        model(grid.data.rank + step + 2).backward()
        replicas.finish_grad_sync()
        _, norm = replicas.loss_and_grad_norm(torch.zeros((), dtype=torch.float64))
        replicas.step(norm, 2.0)
        serially.zero_grad()
        sum(reference(rank + turn) for rank in range(world.size) for turn in (step + 1, step + 2)).backward()
        assert norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_(expected, 2.0)), rel=1e-12)
        serially.step()
    for ours, theirs in zip(parameters, expected):
        with ours.gathered if method == "zero3" else contextlib.nullcontext():
            torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-12, atol=1e-12)


class Sum(torch.nn.Module):
    """The sum over parameters of a function of each and a number."""

    def __init__(self, parameters, term):
        super().__init__()
        self.held, self.term = torch.nn.ParameterList(parameters), term

    def forward(self, number):
        return sum(self.term(p, number) for p in self.held)


BYTES = {"ddp": lambda n: 16, "zero1": lambda n: 4 + 12 / n, "zero2": lambda n: 2 + 14 / n, "zero3": lambda n: 16 / n}


@pytest.mark.ranks(2, 4)  # of which all objects are looked at
@pytest.mark.parametrize("method", BYTES)
def test_memory_is_what_theory_says(world, method):
    """Bytes a parameter of all tensors that live between steps: bfloat16 weights and gradients, float32 masters and
    two moments. By messages, as memory that ranks share would not be any rank's own."""
    grid = Grid(data=world.size)
    by_messages(grid)
    before = storages()
    _, replicas, _ = trained(
        method, grid, SMALL, 2, 1.0, dtype=torch.float32, precision=Precision(compute=torch.bfloat16)
    )
    live = sum(nbytes for place, nbytes in storages().items() if place not in before)
    parameters = sum(p.numel() for p in replicas.parameters)
    assert world.allreduce(live) / world.size / parameters == pytest.approx(BYTES[method](world.size), rel=0.1)


def storages():
    """Of all tensors that have memory: torch.compile leaves some without. None is asked by a way of its own: gradients
    that another test left would be summed."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    tensors = [each for each in tensors if not isinstance(each, FakeTensor)]
    with torch._C.DisableTorchFunctionSubclass():
        return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


@pytest.mark.parametrize("method", METHODS)
def test_saved_training_goes_on_alike(world, method):
    """The state of one run, each element written once, loaded by one with other buckets and another method."""
    grid = Grid(data=world.size)
    model, replicas, _ = trained(method, grid, SMALL, 1, 0.0)
    names = {p: name for name, p in model.named_parameters()}
    saved, written = {}, {}
    for rank in world.allgather(replicas.to_save(names)):
        for entry in rank:
            whole = saved.setdefault(entry.name, torch.zeros(entry.shard.global_shape, dtype=entry.tensor.dtype))
            whole[entry.shard.slices] = entry.tensor.view(entry.shard.shape)
            written[entry.name] = written.get(entry.name, 0) + entry.tensor.numel()
    assert written == {name: whole.numel() for name, whole in saved.items()}
    assert len(saved) == 4 * len(names)  # weight, step and two moments
    for name, whole in whole_parameters(model, grid):
        if grid.rank == 0:
            assert torch.equal(saved[f"model/{name}"], whole)

    again = GPT2(grid, SMALL, key=RngKey(4), dtype=torch.float64)
    optimizer = adamw(again.parameters(), 0.1)
    other = made({"zero1": "zero2", "zero2": "zero3", "zero3": "zero1"}[method], again, grid, optimizer, 3000)
    described = {name: Described(tuple(whole.shape), whole.dtype) for name, whole in saved.items()}
    for entry in other.to_load({p: name for name, p in again.named_parameters()}, described):
        entry.tensor.view(entry.shard.shape).copy_(saved[entry.name][entry.shard.slices])
    other.loaded()
    for group in optimizer.param_groups:
        group["lr"] = 1e-2
    trainers = [
        Trainer(model, grid, replicas.optimizer, strategy=replicas),
        Trainer(again, grid, optimizer, strategy=other),
    ]
    for step in range(2):
        one, two = (trainer.step(microbatches(grid, batches(SMALL)[0], step, 1)) for trainer in trainers)
        assert one == pytest.approx(two, rel=1e-12)
    for (_, one), (_, two) in zip(whole_parameters(model, grid), whole_parameters(again, grid)):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("method", ["zero1", "zero2"])
def test_changed_weights_reach_every_replica(world, method):
    """Such as those of a checkpoint, or their average: a rank that changes its range tells the others."""
    grid = Grid(data=2)
    by_messages(grid)
    weight = torch.nn.Parameter(torch.zeros(5, dtype=torch.float64))
    weight.shard = Shard((5,), (slice(0, 5),))
    replicas = made(method, torch.nn.ParameterList([weight]), grid, adamw([weight], 0.1))
    for bucket in replicas.buckets:
        bucket.masters.master.fill_(1 + world.rank)
    replicas.weights_changed()
    assert weight.tolist() == [1, 1, 1, 2, 2]
