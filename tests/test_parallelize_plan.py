"""`parallelize` with a plan: the model computes what it did, and what is divided is what pays on the machine."""

import dataclasses
import itertools
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from parallelize_checks import compare, numbers
from torch import nn

import hpctrain as ht
from hpctrain.convert.box import BoxLinear
from hpctrain.convert.units import divided_and_whole
from hpctrain.plan import Machine
from hpctrain.plan.for_model import unit_graph
from hpctrain.randomness import generator_states

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
TINY = ("tiny",)
ALL = {PAIR, ATTENTION, TINY}


def machine(latency=1e-6, bandwidth=1e10, peak=1e11, memory=1e12, state=4.5e9, launch=0.0):
    """All ranks on one node; `bandwidth` of the link and `state` of the memory, B/s."""
    found = Machine.load("cpu-cluster")
    link = dataclasses.replace(found.link[0], latency=latency, bandwidth=bandwidth)
    device = dataclasses.replace(found.device, memory=memory, reserved=0.0, bandwidth=state, launch=launch)
    software = dataclasses.replace(found.software, asynchronous=True)
    return dataclasses.replace(found, link=(link,), device=device, software=software, peak={"fp64": peak, "fp32": peak})


SLOW = machine(peak=1e5, latency=5e-3)  # a product of the tiny layer takes less than two messages, others more
MACHINES = {  # what: (machine, what is divided on more than one rank)
    "far": (machine(latency=1.0), set()),
    "slow": (SLOW, {PAIR, ATTENTION}),
    "of launches": (machine(peak=1e5, latency=5e-3, launch=0.1), set()),  # none fewer where work is divided
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


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads, self.head_dim = 4, 2
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (each(x).unflatten(-1, (-1, 2)).transpose(1, 2) for each in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms, self.heads, self.mlp = nn.ModuleList([nn.LayerNorm(8), nn.LayerNorm(8)]), Heads(), Gated()

    def forward(self, x):
        x = x + self.heads(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


def blocks(count):
    return nn.Sequential(*(Residual() for _ in range(count)))


FREE = machine(latency=0.0, bandwidth=1.0, peak=1e300, state=1e300)  # seconds are bytes


def bytes_of(model, grid, x, shards):
    """That a rank receives where all that can be is divided."""
    graph = unit_graph(model, grid, x, FREE, (), shards)
    problem = graph.problem()
    for costs, choices, work in zip(problem.costs, graph.choices, graph.work):
        costs[[work.unit is not None and not choice.divided for choice in choices]] = math.inf
    return problem.cost(problem.best())


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("shards", [False, True])
def test_bytes_are_those_of_the_ledger(world, shards):
    """Of a block where all that can be is divided: forward, backward and what is gathered once more."""
    for box in {2: [(2, 1, 1), (1, 2, 1)], 4: [(4, 1, 1), (2, 1, 2), (2, 2, 1)]}[world.size]:
        grid, x, expected, received = ht.Grid(tensor=box), numbers(2, 4, 8), [], []
        for count in (2, 3):
            model = blocks(count).double()
            expected.append(bytes_of(model, grid, x, shards) if grid.rank == 0 else 0.0)
            ht.parallelize(model, grid, check_steps=0, shard_activations=shards)
            grid.transport.traffic.clear()
            model(x.clone().requires_grad_()).sum().backward()
            received.append(grid.transport.traffic.total("received"))
        if grid.rank == 0:
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
    assert isinstance(model[1].heads.q_proj, BoxLinear)


@pytest.mark.ranks(2, 4)
def test_megatron_on_a_line(world):
    """Of a block as large as GPT-3's, of which nothing is computed."""
    with torch.device("meta"):
        model = nn.TransformerEncoderLayer(12288, 96, 4 * 12288, 0.0, batch_first=True, norm_first=True)
        x = torch.empty(1, 2048, 12288)
    plan = ht.plan.for_model(model, ht.Grid(tensor=world.size), x, "dgx-h100")
    assert {("linear1", "linear2"), ("self_attn.out_proj", "self_attn")} <= {*plan.divided}
    assert plan.box == (world.size, 1, 1)


@pytest.mark.ranks(2)
def test_memory(world):
    """What moves more than it saves is divided where it would not fit."""
    make, grid, x = Block().double, ht.Grid(tensor=2), numbers(2, 6, WIDTH)
    whole = ht.plan.for_model(make(), grid, x, machine(latency=1.0))
    assert (whole.divided, whole.shard_activations) == ((), False)
    for share, least in ((0.9, ATTENTION), (0.8, PAIR)):  # which sends as much, and saves more
        less = share * whole.memory * 1.05  # of each byte that is allocated, the allocator wastes 0.05
        plan = ht.plan.for_model(make(), grid, x, machine(latency=1.0, memory=less))
        assert plan.divided == (least,)
        assert plan.memory <= less / 1.05
    with pytest.raises(
        ValueError, match=r"needs at least 1\.904e\+04 bytes a rank on tensor=2, where machine cpu-cluster has 95\.24 "
    ):
        ht.plan.for_model(make(), grid, x, machine(memory=100.0))
    with pytest.raises(ValueError, match="where machine cpu-cluster has 0 for it"):
        reserved = machine(memory=100.0)
        reserved = dataclasses.replace(reserved, device=dataclasses.replace(reserved.device, reserved=200.0))
        ht.plan.for_model(make(), grid, x, reserved)


class Tied(nn.Module):
    """Looking up is quick, and the product that has the same weight is not."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(16, WIDTH), nn.Linear(WIDTH, 16, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(self.table(ids))


@pytest.mark.ranks(2)
def test_a_weight_that_is_shared(world):
    """Is divided for both, or for none."""
    ids = torch.arange(48).view(4, 12) % 16
    for on, expected in ((SLOW, {"table", "head"}), (machine(latency=1.0), set())):
        model = compare(Tied, ht.Grid(tensor=2), [ids], plan="auto", example=(ids,), machine=on)
        assert divided(model) == expected


@pytest.mark.ranks(2)
def test_the_example_leaves_no_trace(world):
    torch.manual_seed(world.rank)
    model, before = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)), torch.get_rng_state()
    plan = ht.plan.for_model(model, ht.Grid(tensor=2), {"input": torch.ones(3, 4)}, "cpu-cluster")
    assert torch.equal(torch.get_rng_state(), before)
    assert model[1].num_batches_tracked == 0
    assert torch.equal(model[1].running_mean, torch.zeros(4))
    assert world.allgather(plan) == [plan] * 2


class Drawing(nn.Linear):
    """Draws from Python's and NumPy's generators, gives a buffer new memory, and keeps another for the next call."""

    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("last", None)

    def forward(self, x):
        self.mean, self.last = self.mean + x.mean(0) + random.random() + np.random.rand(), x
        return super().forward(x)


@pytest.mark.ranks(2)
def test_the_example_leaves_what_is_not_of_torch(world):
    model, before = Drawing(), generator_states()
    mean = model.mean
    ht.plan.for_model(model, ht.Grid(tensor=2), torch.ones(3, 4), "cpu-cluster")
    assert generator_states() == before
    assert model.mean is mean
    assert model.last is None
    assert torch.equal(mean, torch.zeros(4))


class Constant(nn.Linear):
    def forward(self, x):
        return x


def lacking():
    return dataclasses.replace(machine(), peak={"bf16": 1e12})


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plan": "best"}, r'plan must be None, "auto" or what ht\.plan\.for_model gave, got \'best\''),
        ({"plan": "auto"}, 'plan="auto" needs example'),
        ({"example": torch.ones(2, 4)}, r'example and machine are for plan="auto", got plan=None'),
        ({"plan": "auto", "shard_activations": True}, "shard_activations is the plan's to choose"),
        ({"machine": "moon"}, r"there is no machine 'moon'; "),
        ({"machine": "nowhere.toml"}, r"there is no machine file nowhere\.toml: `hpctrain machine -o nowhere\.toml` m"),
        ({"machine": lacking()}, r"machine cpu-cluster has no peak\.fp32 \(flop/s\)"),
        ({"example": torch.ones(2, 5)}, r"a plan of Linear: it does not run with the example \(RuntimeError: "),
        ({"model": Constant(4, 4)}, "a plan of Constant: what it returns for the example depends on no weights"),
        ({"model": nn.Tanh()}, "a plan of Tanh: what it returns for the example depends on no weights"),
        ({"model": nn.Linear(4, 4).to(torch.float8_e5m2)}, r"of models of torch\.float64, .* got torch\.float8_e5m2"),
        ({"pipeline": 2}, "a plan of a model is of its tensor axis, got a grid with pipeline=2; leave plan out"),
        ({"replicate": ["x"]}, "replicate: no module has the path or type 'x'"),
    ],
)  # fmt: skip
def test_refused(world, options, message):
    model = options.pop("model", None) or nn.Linear(4, 4)
    grid = ht.Grid(pipeline=2) if options.pop("pipeline", 1) == 2 else ht.Grid(tensor=2)
    if not {"plan", "example"} & {*options} or "5" in str(options.get("example", torch.ones(2)).shape):
        options = {"plan": "auto", "example": torch.ones(2, 4), "machine": "cpu-cluster"} | options
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        ht.parallelize(model, grid, **options)
    assert not hasattr(model, "hpctrain_grid")


@pytest.mark.ranks(2)
def test_a_plan_for_others(world):
    grid, x = ht.Grid(tensor=2), torch.ones(2, 4)
    torch.manual_seed(0)
    plan = ht.plan.for_model(nn.Linear(4, 4), grid, x, "cpu-cluster")
    with pytest.raises(ValueError, match=r"the plan was made for a grid of tensor=\(2, 1, 1\), got tensor=\(1, 1, 2\)"):
        ht.parallelize(nn.Linear(4, 4), ht.Grid(tensor=(1, 1, 2)), plan=plan)
    model = ht.parallelize(nn.Linear(4, 4), grid, plan=plan)
    assert divided(model) == {path for unit in plan.divided for path in unit}
    with pytest.raises(ValueError, match="the model is already parallelized; plan before"):
        ht.plan.for_model(model, grid, x, "cpu-cluster")


@pytest.mark.ranks(2)
def test_what_stays_whole_leaves_the_others_together(world):
    def chain():
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.Linear(4, 9), nn.Linear(9, 4))

    def encoder():
        return nn.TransformerEncoderLayer(4, 2, 7, dropout=0.0, batch_first=True)

    grid = ht.Grid(tensor=2)
    assert [unit.paths for unit in divided_and_whole(chain(), grid)[0]] == [("0", "2"), ("3", "4")]
    assert {*compare(chain, grid, [numbers(3, 4)], replicate=["3"]).divided} == {0, 1}
    assert not compare(encoder, grid, [numbers(2, 3, 4)], replicate=["norm1"]).linear1.leaves
    assert compare(encoder, grid, [numbers(2, 3, 4)], replicate=["dropout"]).linear1.leaves


@pytest.mark.ranks(2)
def test_the_example_of_the_readme(world):
    text = (Path(ht.__file__).parent / "convert/README.md").read_text(encoding="utf-8")
    (program,) = (block for block in text.split("```python") if 'plan="auto"' in block.partition("```")[0])
    names = {}
    exec(program.partition("```")[0], names)
    assert not {*names["plan"].replicate} & divided(names["model"])
