"""Replicas that compute from different weights, in different numbers of microbatches, against one process in torch.

The examples are drawn at random, alike on all ranks: see conftest.py.
"""

import contextlib
import copy
import dataclasses
import functools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import hpctrain as ht
from hpctrain.data_parallel import DataParallel, LocalSGD, ParameterServer, Zero1, Zero2, Zero3
from hpctrain.pipeline import Network, StageGraph, schedule
from hpctrain.shard import Shard

pytestmark = pytest.mark.mpi

METHODS = {
    "ddp": DataParallel, "zero1": Zero1, "zero2": Zero2, "zero3": Zero3, "parameter_server": ParameterServer,
    "local_sgd": LocalSGD,
}  # fmt: skip
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.1),
}
STEPS = 2


class Part(nn.Module):
    """Weights of several sizes, each of which is used where it is named."""

    def __init__(self, sizes, start):
        super().__init__()
        values = [torch.arange(1.0, size + 1, dtype=torch.float64) / (start + number + 2) for number, size in sizes]
        self.weights = nn.ParameterDict({str(number): v for (number, _), v in zip(sizes, values)})

    def forward(self, reached, factor):
        used = [(self.weights[str(n)] * factor).sin().sum() for n in reached if str(n) in self.weights]
        return sum(used) if used else None


class Model(nn.Module):
    """A list of parts, or one of them that is the whole model; only parts that are reached are computed."""

    def __init__(self, sizes, parts):
        super().__init__()
        numbered = list(enumerate(sizes))
        made = [Part(numbered[first::parts], first) for first in range(parts)]
        self.parts = nn.ModuleList(made) if parts > 1 else None
        self.only = made[0] if parts == 1 else None

    def forward(self, reached, factor):
        if self.only is not None:
            return self.only(reached, factor)
        parts = (part for part in self.parts if any(str(n) in part.weights for n in reached))
        return sum(part(reached, factor) for part in parts)


@st.composite
def examples(draw, ranks, method):
    sizes = draw(st.lists(st.integers(0, 7), min_size=1, max_size=6))
    everything = range(len(sizes))
    shared = draw(st.sampled_from([False, False, True]))
    frozen = draw(st.sets(st.sampled_from(everything), max_size=len(sizes) - 1))
    in_step = method == "zero3" and not shared  # whose gathers are collectives of all replicas
    trained = [n for n in everything if n not in frozen]
    subsets = st.sets(st.sampled_from(trained), min_size=1)
    count = draw(st.integers(1, 3))
    counts = [count if in_step else draw(st.integers(0, 3)) for _ in range(STEPS * ranks)]
    reached = [[draw(subsets) for _ in range(each)] for each in counts]
    return {
        "sizes": sizes,
        "frozen": frozen,
        "parts": 1 if in_step else draw(st.integers(1, 3)),
        "shared": shared,
        "bucket_bytes": draw(st.sampled_from([1, 60, 1 << 20])),
        "optimizer": "sgd" if method == "local_sgd" else draw(st.sampled_from(sorted(OPTIMIZERS))),
        "max_norm": 0.0 if method == "local_sgd" else draw(st.sampled_from([0.0, 1.5])),
        "reached": [reached[step * ranks : (step + 1) * ranks] for step in range(STEPS)],  # of each replica's backwards
    }


def model_of(example):
    model = Model(example["sizes"], min(example["parts"], len(example["sizes"])))
    for name, p in model.named_parameters():
        p.shard = Shard((len(p),), (slice(0, len(p)),))
        p.requires_grad_(int(name.rsplit(".", 1)[1]) not in example["frozen"])
    return model, [p for p in model.parameters() if p.requires_grad]


def factor(step, rank, number):
    return 0.3 + step + rank / 3 + number / 7


def serially(example, workers):
    """Weights and norms of plain torch; a weight that nobody reached has a gradient of zero."""
    model, parameters = model_of(example)
    optimizer, norms = OPTIMIZERS[example["optimizer"]](parameters), []
    for step, replicas in enumerate(example["reached"]):
        for p in parameters:
            p.grad = torch.zeros_like(p)
        for rank, backwards in enumerate(replicas[:workers]):
            for number, reached in enumerate(backwards):
                model(reached, factor(step, rank, number)).backward()
        limit = example["max_norm"] or float("inf")
        norms.append(float(nn.utils.clip_grad_norm_(parameters, limit)))
        optimizer.step()
    return model, norms


@functools.cache  # a grid makes several communicators
def grid_of(size, shared):
    grid = ht.Grid(data=size)
    grid.data.one_node &= shared
    return grid


def check(world, method, example):
    rank, workers = world.rank, world.size - (method == "parameter_server")
    expected, norms = serially(example, workers)
    grid = grid_of(world.size, example["shared"])
    model, parameters = model_of(example)
    optimizer = OPTIMIZERS[example["optimizer"]](parameters)
    given = model if method == "zero3" else parameters
    replicas = METHODS[method](given, grid, optimizer, bucket_bytes=example["bucket_bytes"])
    trainer = ht.Trainer(
        model, grid, optimizer, loss=lambda model, batch: model(batch[1], factor(batch[2], rank, batch[0])),
        max_norm=example["max_norm"], strategy=replicas,
    )  # fmt: skip
    for step, everybody in enumerate(example["reached"]):
        mine = [(number, layers, step) for number, layers in enumerate(everybody[rank])] if rank < workers else []
        _, norm = trainer.step(mine)
        if method != "local_sgd":  # which reports the norms of the replicas
            assert norm == pytest.approx(norms[step], rel=1e-12, abs=1e-14), (method, example)
    for (name, ours), theirs in zip(model.named_parameters(), expected.parameters()):
        with ours.gathered if method == "zero3" and ours.requires_grad else contextlib.nullcontext():
            torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-12, atol=1e-12, msg=f"{name} {example}")


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=pytest.mark.ranks(2, 4)) if "server" in name else name for name in METHODS]
)
def test_replicas_that_reach_different_weights(world, method):

    @settings(suppress_health_check=list(HealthCheck), print_blob=False)
    @given(examples(world.size, method))
    def any_example(example):
        check(world, method, copy.deepcopy(example))

    any_example()


DIFFERENT = {  # the layers that the last replica computes in a step's backwards, and what is said of it
    "one less": (
        [[0, 2]],
        "replica 0 comes to the forward of layers.1, replica {last} comes to the forward of layers.2:",
    ),
    "another order": (
        [[0, 2, 1]],
        "replica 0 comes to the forward of layers.1, replica {last} comes to the forward of layers.2:",
    ),
    "a backward more": (
        [[0, 1, 2], [0, 1, 2]],
        "replica 0 comes to the end of a step, replica {last} comes to the forward of layers.0:",
    ),
    "no backward": ([], "replica 0 comes to the forward of layers.0, replica {last} comes to the end of a step:"),
}


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("name", DIFFERENT)
def test_layers_that_other_replicas_do_not_compute(world, name):
    """By messages the weights of layers of one size would be mixed: refused by all ranks, before any is."""
    mine, said = DIFFERENT[name]
    last = world.size - 1
    grid = grid_of(world.size, False)
    torch.manual_seed(0)
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(3, 3) for _ in range(3))})
    for p in model.parameters():
        p.shard = Shard(tuple(p.shape), tuple(slice(0, size) for size in p.shape))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss(model, layers):
        y = torch.ones(1, 3)
        for number in layers:
            y = model["layers"][number](y)
        return y.sum()

    trainer = ht.Trainer(model, grid, optimizer, loss=loss, strategy=Zero3(model, grid, optimizer))
    with pytest.raises(ValueError, match="zero3 between nodes needs .*" + said.format(last=last) + ".*zero2"):
        trainer.step(mine if world.rank == last else [[0, 1, 2]])


class Sometimes(nn.Module):
    """A stage that multiplies by one weight, and by another one in some of its forwards only."""

    def __init__(self, forwards):
        super().__init__()
        self.always, self.sometimes = (nn.Parameter(torch.tensor(w, dtype=torch.float64)) for w in (1.5, 0.7))
        self.forwards, self.count = forwards, 0

    def forward(self, x, target=None):
        y = self.always * x
        if self.count in self.forwards:
            y = self.sometimes * y
        self.count += 1
        return y if target is None else (y - target).square().sum()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("one_node", [True, False])
@pytest.mark.parametrize("method", ["ddp", "zero1", "zero2"])
def test_replicas_of_a_pipeline_that_fill_their_buckets_in_different_microbatches(world, method, one_node):
    """The first replica's first stage and the second one's last stage use all weights in every microbatch, the others
    in their last one: a sum that is waited for in a backward would wait for a replica that waits, stage by stage, for
    this one."""
    count = 4
    used = {(0, 0): range(4), (0, 1): [3], (1, 0): [3], (1, 1): range(4)}  # (replica, stage): microbatches
    grid = ht.Grid(data=2, pipeline=2)
    grid.data.one_node &= one_node
    made = schedule("1f1b", 2, count)
    made = dataclasses.replace(made, graph=StageGraph.chain(2, (1,), "float64"))
    replica, stage = grid.data.rank, grid.pipeline.rank
    model = Network(grid, made, [functools.partial(Sometimes, used[replica, s]) for s in range(2)])
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    strategy = METHODS[method](list(model.parameters()), grid, optimizer, bucket_bytes=1)
    inputs = [[torch.tensor([1.0 + m + 3 * r], dtype=torch.float64) for m in range(count)] for r in range(2)]
    norm = ht.Trainer(model, grid, optimizer, made, strategy=strategy).step([(x, -x) for x in inputs[replica]])[1]

    stages = [[Sometimes(used[r, s]) for s in range(2)] for r in range(2)]
    for r in range(2):
        for x in inputs[r]:
            stages[r][1](stages[r][0](x), -x).backward()
    gradients = [[sum(stages[r][s].get_parameter(name).grad for r in range(2)) for name in ("always", "sometimes")]
                 for s in range(2)]  # fmt: skip
    assert norm == pytest.approx(float(torch.tensor(gradients).norm()), rel=1e-12)
    for ours, start, gradient in zip(model.parameters(), (1.5, 0.7), gradients[stage]):
        assert ours.item() == pytest.approx(start - 0.01 * gradient.item(), rel=1e-12)
