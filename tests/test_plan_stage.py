"""Inside a stage: the program finds what trying everything finds; Megatron's pairs and Agarwal's alternation come out
of it by themselves; what it counts is what theory says."""

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest

from hpctrain.cli import main
from hpctrain.config import load_config
from hpctrain.models import LinearCosts, TransformerCosts
from hpctrain.plan import Machine, inside_stage
from hpctrain.plan import job as jobs
from hpctrain.plan.inside_stage import Stage, divided
from hpctrain.plan.one_hot import OneHot

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
