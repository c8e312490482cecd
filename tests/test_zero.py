"""ZeRO: training equals the serial program's, with state, gradients and weights spread over the replicas."""

import contextlib
import copy
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
from hpctrain.shard import Shard, split
from hpctrain.shard_entries import Described
from hpctrain.train.optimizer import make_optimizer
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
    optimizer = make_optimizer(model.parameters(), 0.1)
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
    optimizer = make_optimizer(again.parameters(), 0.1)
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
    replicas = made(method, torch.nn.ParameterList([weight]), grid, make_optimizer([weight], 0.1))
    for bucket in replicas.buckets:
        bucket.masters.master.fill_(1 + world.rank)
    replicas.weights_changed()
    assert weight.tolist() == [1, 1, 1, 2, 2]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("method", METHODS)
def test_an_evaluation_of_too_few_microbatches(world, method):
    """Is refused before any rank's weights become their moving average."""
    grid = Grid(data=2)
    model = GPT2(grid, SMALL, key=RngKey(3), dtype=torch.float64)
    optimizer = make_optimizer(model.parameters(), 0.1, ema_decay=0.5)
    trainer = Trainer(model, grid, optimizer, 2, strategy=made(method, model, grid, optimizer))
    both = microbatches(grid, batches(SMALL)[0], 0, 2)
    trainer.step(both)
    before = [whole.clone() for _, whole in whole_parameters(model, grid)]
    with pytest.raises(ValueError, match="1f1b is made for 2 microbatches on each replica, got 1; some may be empty"):
        trainer.evaluate([both, both[:1]], averaged=True)
    assert all(torch.equal(old, now) for old, (_, now) in zip(before, whole_parameters(model, grid), strict=True))


class Nested(torch.nn.Module):
    """With lists and dicts in one another, which nobody calls, and an embedding of such that is the head as well."""

    def __init__(self):
        super().__init__()
        blocks = [torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 6)) for _ in range(3)]
        self.transformer = torch.nn.ModuleDict({
            "wte": torch.nn.Embedding(11, 6),
            "h": torch.nn.ModuleList(blocks),
            "pairs": torch.nn.ModuleList([torch.nn.ModuleDict({name: torch.nn.Linear(6, 6) for name in "ab"})]),
            "scales": torch.nn.ParameterList([torch.ones(6), torch.ones(6)]),
            "norm": torch.nn.LayerNorm(6),
        })  # fmt: skip
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.transformer["wte"].weight
        self.again = blocks[0][0]  # a part of a layer, called outside as well

    def forward(self, ids):
        parts = self.transformer
        x = parts["wte"](ids)
        for block in parts["h"]:
            x = x + block(x) * parts["scales"][0]
        (pair,) = parts["pairs"]
        x = x + pair["b"](pair["a"](x).tanh()) * parts["scales"][1]
        return self.head(parts["norm"](x) + self.again(x)[..., :6])


@pytest.mark.parametrize("messages", [True, False])
def test_layers_in_nested_lists_and_weights_also_used_outside(world, messages):
    grid = Grid(data=world.size)
    if messages:
        by_messages(grid)
    torch.manual_seed(0)
    serially = Nested().double()
    model = copy.deepcopy(serially)
    for p in model.parameters():
        p.shard = Shard.whole(tuple(p.shape))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    replicas = Zero3(model, grid, optimizer, bucket_bytes=300)
    ids = torch.arange(8 * 5).view(8, 5) ** 2 % 11
    mine = ids[split(8, world.size, world.rank)]
    trainer = Trainer(model, grid, optimizer, loss=nested_loss, strategy=replicas)
    steps = torch.optim.AdamW(serially.parameters(), 0.01)
    for _ in range(2):
        got, _ = trainer.step([mine[:1], mine[1:]])
        steps.zero_grad()
        expected = nested_loss(serially, ids)
        expected.backward()
        steps.step()
        assert got == pytest.approx(expected.item(), rel=1e-12)
    for ours, theirs in zip(model.parameters(), serially.parameters()):
        with ours.gathered:
            torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-12, atol=1e-12)


def nested_loss(model, ids):
    return torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten(), reduction="sum") / 40


@pytest.mark.ranks(2)
def test_weights_outside_of_the_layers_of_a_model_without_a_forward(world):
    """By messages nobody would gather them; on one node they are there."""
    for messages in (False, True):
        grid = Grid(data=2)
        if messages:
            by_messages(grid)
        model = torch.nn.ModuleDict({"first": torch.nn.Linear(3, 3), "h": torch.nn.ModuleList([torch.nn.Linear(3, 3)])})
        for p in model.parameters():
            p.shard = Shard.whole(tuple(p.shape))
        refused = pytest.raises(ValueError, match="ModuleDict has no forward, and 2 weights .* or choose zero2")
        with refused if messages else contextlib.nullcontext():
            Zero3(model, grid, torch.optim.SGD(model.parameters(), 0.1))
        assert all(len(p) for p in model.parameters())


@pytest.mark.ranks(1, 2)
def test_weights_or_the_model(world):
    """Which of the two a strategy takes is said where it got the other."""
    grid, model = Grid(data=world.size), torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match=r"Zero3 takes the model, .* got a generator; write Zero3\(model, grid, opt"):
        Zero3(model.parameters(), grid, optimizer)
    for given, kind in [(torch.nn.Sequential(), "Sequential"), ([{"params": []}], "dict")]:
        with pytest.raises(ValueError, match=rf"Zero1 takes weights, model.parameters\(\), got a {kind}"):
            Zero1(given, grid, optimizer)
