"""`parallelize` with a plan: the model computes what it did, and what is divided is what pays on the machine."""

import dataclasses
import itertools
import math

import pytest
import torch
from parallelize_checks import compare, numbers
from torch import nn

import hpctrain as ht
from hpctrain.convert.box import BoxLinear
from hpctrain.plan import Machine
from hpctrain.plan.for_model import unit_graph

WIDTH = 8


class Block(nn.Module):
    """A pair of linear layers, attention, norms, and a layer of two features."""

    def __init__(self, width=WIDTH, heads=4):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.tiny = nn.Linear(width, 2)

    def forward(self, x):
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.mlp(self.norms[1](x))
        return self.tiny(x)


PAIR, ATTENTION = ("mlp.0", "mlp.2"), ("attention.out_proj", "attention")
NORMS, TINY = {("norms.0",), ("norms.1",)}, ("tiny",)
ALL = {PAIR, ATTENTION, TINY, *NORMS}


def machine(latency=1e-6, bandwidth=1e10, peak=1e11, memory=1e12, state=4.5e9):
    """All ranks on one node; `bandwidth` of the link and `state` of the memory, B/s."""
    found = Machine.load("cpu-cluster")
    link = dataclasses.replace(found.link[0], latency=latency, bandwidth=bandwidth)
    device = dataclasses.replace(found.device, memory=memory, bandwidth=state)
    return dataclasses.replace(found, link=(link,), device=device, peak={"fp64": peak, "fp32": peak})


SLOW = machine(peak=1e5, latency=5e-3)  # a product of the tiny layer takes less than two messages, others more
MACHINES = {  # what: (machine, what is divided on more than one rank)
    "far": (machine(latency=1.0), set()),
    "slow": (SLOW, {PAIR, ATTENTION}),
    "near": (machine(latency=0.0, bandwidth=1e15, peak=1e6), ALL),
}


pytestmark = pytest.mark.mpi


def divided(model):
    """Paths of the modules whose weights are not whole on every rank."""
    parts = ((path, p) for path, module in model.named_modules() for p in module._parameters.values() if p is not None)
    return {path for path, p in parts if not p.shard.replicated}


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("case", MACHINES)
def test_equal_and_what_pays(world, case):
    on, expected = MACHINES[case]
    example = numbers(2, 6, WIDTH)
    model = compare(Block, ht.Grid(tensor=world.size), [example], plan="auto", example=example, machine=on)
    if world.size > 1:
        assert divided(model) == {path for unit in expected for path in unit}


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = (nn.Linear(*each, bias=False) for each in [(8, 16), (8, 16), (16, 8)])

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(8), Gated()

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def blocks(count):
    return nn.Sequential(*(Residual() for _ in range(count)))


FREE = machine(latency=0.0, bandwidth=1.0, peak=1e300, state=1e300)  # seconds are bytes


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("shards", [False, True])
def test_bytes_are_those_of_the_ledger(world, shards):
    """Of a block where all that can be is divided: forward, backward and what is gathered once more."""
    for box in {2: [(2, 1, 1), (1, 2, 1)], 4: [(4, 1, 1), (2, 1, 2), (2, 2, 1)]}[world.size]:
        grid, x, expected, received = ht.Grid(tensor=box), numbers(2, 4, 8), [], []
        for count in (2, 3):
            model = blocks(count).double()
            graph = unit_graph(model, grid, x, FREE, (), shards)
            problem = graph.problem()
            for costs, choices, work in zip(problem.costs, graph.choices, graph.work):
                costs[[work.unit is not None and not choice.divided for choice in choices]] = math.inf
            expected.append(problem.cost(problem.best()))
            ht.parallelize(model, grid, check_steps=0, shard_activations=shards)
            grid.transport.traffic.clear()
            model(x.clone().requires_grad_()).sum().backward()
            received.append(grid.transport.traffic.total("received"))
        assert expected[1] - expected[0] == pytest.approx(received[1] - received[0], rel=1e-9), box


@pytest.mark.ranks(2)
def test_the_best_of_everything(world):
    """As trying all choices finds."""
    model, grid = Block().double(), ht.Grid(tensor=2)
    for shards in (False, True):
        graph = unit_graph(model, grid, numbers(2, 6, WIDTH), SLOW, (), shards)
        problem = graph.problem()
        least = min(map(problem.cost, itertools.product(*(range(len(choices)) for choices in graph.choices))))
        assert problem.cost(problem.best()) == pytest.approx(least, rel=1e-9)


@pytest.mark.ranks(4)
def test_agarwal_on_a_box(world):
    """Where moving costs more than computing saves by less than on a line."""
    on = machine(latency=0.0, bandwidth=1e6, peak=1e6)
    x = numbers(4, 24, 8)
    model = compare(lambda: blocks(2), ht.Grid(tensor=(2, 1, 2)), [x], plan="auto", example=x, machine=on)
    assert isinstance(model[1].mlp.up, BoxLinear)
