"""Inside a stage: the program finds what trying everything finds; Megatron's pairs and Agarwal's alternation come out
of it by themselves; what it counts is what theory says."""

import dataclasses
import itertools
import json
import math
import re

import numpy as np
import pytest
import torch
from running import ROOT

from hpctrain.cli import main
from hpctrain.config import load_config
from hpctrain.models import LinearCosts, TransformerCosts
from hpctrain.plan import Machine, inside_module, inside_stage
from hpctrain.plan import job as jobs
from hpctrain.plan.inside_stage import divided
from hpctrain.plan.one_hot import OneHot
from hpctrain.plan.operators import operators
from hpctrain.plan.stage_rules import Stage

GPT3 = ["model.width=12288", "model.heads=96", "model.context=2048", "train.batch=1", "precision.compute=bf16"]


def random_graph(seed):
    """Up to 5 nodes of up to 4 choices; any edges, circles too; some choices and pairs are not allowed."""
    random = np.random.default_rng(seed)
    sizes = random.integers(1, 5, random.integers(1, 6))

    def costs(*shape):
        found = random.integers(0, 20, shape) / 4 if seed % 2 else random.random(shape)  # ties, or none
        return np.where(random.random(shape) < 0.1, math.inf, found)

    nodes = [costs(size) for size in sizes]
    pairs = [pair for pair in itertools.permutations(range(len(sizes)), 2) if random.random() < 0.4]
    edges = {(u, v): costs(sizes[u], sizes[v]) for u, v in pairs}
    memory = [random.integers(0, 10, size) for size in sizes]
    return OneHot(nodes, edges, memory, math.inf if seed % 3 == 0 else float(random.integers(0, 8 * len(sizes))))


def test_the_best_of_everything():
    """200 graphs; of some nothing is allowed, or nothing fits."""
    found = []
    for seed in range(200):
        graph = random_graph(seed)
        every = itertools.product(*(range(len(costs)) for costs in graph.costs))
        fitting = (choices for choices in every if graph.needs(choices) <= graph.limit)
        least = min(map(graph.cost, fitting), default=math.inf)
        best = graph.best()
        assert (best is None) == (least == math.inf), seed
        if best is not None:
            assert graph.cost(best) == pytest.approx(least, rel=1e-9, abs=1e-9), seed
            assert graph.needs(best) <= graph.limit, seed
        found.append(best is None)
    assert 0 < sum(found) < 150


def test_nothing_fits_into_less_than_nothing():
    assert OneHot([np.array([1.0, 2.0])], {}, [np.array([10.0, 5.0])], limit=-3.0).best() is None
    large = ["model.width=4096", "model.heads=32", "model.layers=24", "grid.tensor=2"]
    for recompute in ("none", "block"):
        with pytest.raises(ValueError, match=r"a block keeps at least .* bytes of a microbatch, where 0 are left for "):
            inside_stage(load_config(overrides=[*large, f"train.recompute={recompute}"]), "cpu-cluster")


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_megatron_by_itself(ranks):
    plan = inside_stage(load_config(overrides=[*GPT3, f"grid.tensor={ranks}"]), "dgx-h100")
    assert [(name, rule) for name, rule, _ in plan.operators] == [
        ("attention norm", {"rows": ("x",)}), ("attention in", {"out": ("x",)}),
        ("attention", {"heads": ("x",)}), ("attention out", {"in": ("x",)}),
        ("mlp norm", {"rows": ("x",)}), ("mlp in", {"out": ("x",)}),
        ("activation", {"features": ("x",)}), ("mlp out", {"in": ("x",)}),
    ]  # fmt: skip
    assert plan.present == pytest.approx(plan.seconds, rel=1e-9)


class Counting:
    """A network of one byte a second, without latency: seconds are the bytes that a rank receives."""

    def all_gather(self, nbytes, group):
        return (group.size - 1) / group.size * nbytes

    reduce_scatter = all_to_all = all_gather

    def all_reduce(self, nbytes, group):
        return 2 * self.all_gather(nbytes, group)


def square(rows, widths, box):
    """A block of two products on which nothing takes time but what moves."""
    config = load_config(overrides=[f"grid.tensor={list(box)}", "train.batch=1", "tensor.overlap=[]"])
    job, choice = jobs.read(config)
    linears = LinearCosts(widths[0], widths[1], True, False), LinearCosts(widths[1], widths[0], False, False)
    costs = TransformerCosts(1, widths[0], rows, 10, linears)
    machine = Machine.load("cpu-cluster")
    stage = Stage(dataclasses.replace(job, costs=costs), machine, choice)
    stage.network = Counting()
    fast = dataclasses.replace(machine.device, bandwidth=1e30)
    stage.box.machine, stage.box.rate = dataclasses.replace(machine, device=fast), 1e30
    stage.operators, stage.edges = stage._graph()
    return stage


@pytest.mark.parametrize("box", [(2, 2, 2), (4, 2, 1), (3, 2, 4)])
def test_bytes_of_the_layers_rules(box):
    """Agarwal's product receives (1 - 1/x) of each gathered or scattered block: input and weight three times, forward,
    again, gradient; output twice. A norm has two numbers a row from each rank of y, forward and backward."""
    stage = square(24, (48, 96), box)
    x, y, z = box
    size = stage.job.itemsize

    def part(elements, over, ranks):
        return (1 - 1 / over) * elements / ranks * over

    linears = 0.0
    for n_in, n_out, over_in, over_out in ((48, 96, y, x), (96, 48, x, y)):
        linears += 3 * part(24 * n_in, over_out, x * y * z) + 3 * part(n_in * n_out, z, x * y * z)
        linears += 2 * part(24 * n_out, over_in, x * y * z)
    norm = 2 * 2 * 4 * (24 / (z * x)) * (y - 1)
    assert stage.problem().cost(stage.present()) == pytest.approx(size * linears + norm)


def test_agarwal_by_itself():
    """Of square products, with no element on two ranks, each dim is cut over one axis of a box, in and out features by
    turns, and no other rules move less; which axis has which dim makes no difference here. With memory for whole rows
    of the residual stream on two ranks these need not be gathered again: one in eight bytes less."""
    stage = square(4096, (4096, 4096), (2, 2, 2))
    needed = stage.problem().needs(stage.present())
    plan = divided(stage, limit=needed)
    rules = {name: rule for name, rule, _ in plan.operators}
    into, back = rules["mlp in"], rules["mlp out"]
    assert sorted(map(len, into.values())) == sorted(map(len, back.values())) == [1, 1, 1]
    assert (into["rows"], into["in"], into["out"]) == (back["rows"], back["out"], back["in"])
    assert plan.present == pytest.approx(plan.seconds, rel=1e-9)
    assert plan.kept <= needed
    more = divided(stage)
    assert more.kept > needed
    assert plan.seconds / more.seconds == pytest.approx(8 / 7, rel=1e-3)
    with pytest.raises(ValueError, match=r"at least 3\.355e\+07 bytes of a microbatch, where 3e\+07 are left"):
        divided(stage, limit=3e7)


def test_shown_and_refused(capsys):
    grid = ["grid.tensor=[2,2,1]", "--machine", "frontier", "--show", "stage"]
    main(["plan", "jobs/train.toml", *grid])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10
    assert lines[-1].startswith("as the layers are divided: ")
    main(["plan", "jobs/train.toml", *grid, "tensor.algorithm=summa", "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert shown["present"] is None
    assert [each["name"] for each in shown["operators"]][1:3] == ["attention in", "attention"]
    with pytest.raises(ValueError, match="got a mixture of experts"):
        inside_stage(load_config(overrides=["model.kind=mixtral", "model.experts=4"]), "frontier")


class Attention(torch.nn.Module):
    """Of the plain kind, with rotated queries and keys of their own products."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.back = (torch.nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (each(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        q, k = (each * 0.5 + torch.cat(each.chunk(2, -1)[::-1], -1) for each in (q, k))
        scores = (q @ k.mT + torch.zeros(x.shape[1], x.shape[1], device=x.device)).softmax(-1)
        return self.back((scores @ v).transpose(1, 2).flatten(2))


class Block(torch.nn.Module):
    """With a gated feed-forward, whose norm is RMSNorm written out."""

    def __init__(self, width, heads, ffn):
        super().__init__()
        self.norm, self.attention = torch.nn.LayerNorm(width), Attention(width, heads)
        self.gate, self.up, self.down = (torch.nn.Linear(*each) for each in [(width, ffn)] * 2 + [(ffn, width)])

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        y = x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
        return x + self.down(torch.nn.functional.silu(self.gate(y)) * self.up(y))


def test_operators_of_a_module():
    """What each takes; the sum at the end is the first one's, of the next block."""
    found = operators(Block(16, 4, 24), torch.zeros(2, 3, 16))
    assert [(each.kind, each.name, sorted(each.inputs), each.n_out) for each in found] == [
        ("elementwise", "norm", [5, 8], 16), ("product", "attention.q, k, v", [0], 48),
        ("elementwise", "attention", [1], 16), ("attention", "attention", [1, 2], 16),
        ("product", "attention.back", [3], 16), ("elementwise", "add", [0, 4], 16),
        ("product", "gate, up", [5], 48), ("elementwise", "silu", [6], 24), ("product", "down", [7], 16),
    ]  # fmt: skip
    assert [each.heads for each in found if each.kind == "attention"] == [4]
    assert [number for number, each in enumerate(found) if each.norm] == [0, 5]


@pytest.mark.parametrize("ranks", [2, 8])
def test_megatron_by_itself_of_a_module(ranks):
    """Products that take the residual stream are cut by output features, those that give it by input features."""
    with torch.device("meta"):
        block, x = Block(12288, 96, 32768), torch.empty(8, 2048, 12288)
    plan = inside_module(block, x, ranks, "dgx-h100", "bf16")
    rules = {name: rule for name, rule, _ in plan.operators}
    assert rules["attention.q, k, v"] == rules["gate, up"] == {"out": ("x",)}
    assert rules["attention.back"] == rules["down"] == {"in": ("x",)}
    assert rules["silu"] == {"features": ("x",)}


def test_a_module_is_divided_as_the_model_of_the_same_shape():
    """GPT-3's block, by its numbers and by a call of torch's own layer."""
    by_costs = inside_stage(load_config(overrides=[*GPT3, "grid.tensor=4"]), "dgx-h100")
    with torch.device("meta"):
        layer = torch.nn.TransformerEncoderLayer(12288, 96, 4 * 12288, 0.0, "gelu", batch_first=True, norm_first=True)
        x = torch.empty(1, 2048, 12288)
    traced = inside_module(layer, x, 4, "dgx-h100", "bf16")
    rules = {name: rule for name, rule, _ in traced.operators}
    assert [rule for name, rule, _ in by_costs.operators if name.startswith("mlp") or name == "activation"] == [
        rules["norm2"], rules["linear1"], rules["gelu"], rules["linear2"]
    ]  # fmt: skip
    assert traced.seconds == pytest.approx(by_costs.seconds, rel=0.05)


def test_agarwal_by_itself_of_a_module():
    """Two square products on a box, with no element on two ranks: features by turns, rows over the third axis."""
    with torch.device("meta"):
        two = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, bias=False) for _ in range(2)))
        x = torch.empty(4, 2048, 4096)
    plan = inside_module(two, x, (2, 2, 2), "dgx-h100", "bf16", limit="even")
    _, (_, into, _), (_, back, _) = plan.operators
    assert sorted(into) == ["in", "out", "rows"]
    assert (into["rows"], into["in"], into["out"]) == (back["rows"], back["out"], back["in"])
    assert plan.present == pytest.approx(plan.seconds, rel=1e-9)


class Mixed(torch.nn.Module):
    """Tokens of a sequence are multiplied by a weight."""

    def __init__(self):
        super().__init__()
        self.tokens = torch.nn.Linear(3, 5)

    def forward(self, x):
        return self.tokens(x.mT)


class Constant(torch.nn.Module):
    def forward(self, x):
        return torch.zeros(2)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (torch.nn.Sequential(torch.nn.Conv1d(3, 3, 1)), "and element-wise operators, got convolution in 0"),
        (Mixed(), "rows that stay apart: the input has 6, but tokens multiplies 8"),
        (Constant(), "the output of Constant does not depend on its input"),
    ],
)
def test_modules_without_a_plan(module, message):
    with pytest.raises(ValueError, match=message):
        inside_module(module, torch.zeros(2, 3, 4), 2, "frontier")


def test_the_example_of_the_readme(capsys):
    text = (ROOT / "hpctrain/plan/README.md").read_text(encoding="utf-8")
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], {})
    printed = capsys.readouterr().out.splitlines()
    quoted = re.findall(r"^    (\w+ +\d\.\d+ ms  \{.*\})", text, re.MULTILINE)
    assert len(quoted) == 4
    assert set(quoted) <= set(printed)
    assert printed[-2:] == [
        "0           0.267 ms  {'in': ('x',), 'out': ('y',), 'rows': ('z',)}",
        "1           0.267 ms  {'out': ('x',), 'in': ('y',), 'rows': ('z',)}",
    ]
