"""The search finds what trying everything finds; what it leaves out is proven to be slower."""

import dataclasses
import itertools
import json
import math
import re

import pytest

from hpctrain.cli import main
from hpctrain.config import load_config
from hpctrain.grid_shape import all_grids
from hpctrain.plan import Machine, changes, planned, predict, search
from hpctrain.plan import job as jobs
from hpctrain.plan.estimator import Estimator
from hpctrain.plan.machine import Link
from hpctrain.plan.search import Search
from hpctrain.plan.space import choices, divisors

SMALL = ["model.layers=4", "model.width=256", "model.heads=4", "train.batch=8", "model.context=64"]
LONG = ["model.layers=8", "model.width=128", "model.heads=8", "train.batch=24", "model.context=512"]
LARGE = [
    "model.layers=12",
    "model.width=2048",
    "model.heads=16",
    "train.batch=12",
    "model.context=128",
    "model.tied=false",
]
CPU = Machine.load("cpu-cluster")
SLOW = dataclasses.replace(CPU, link=(Link("a", 1, 2e-5, 2e8), Link("b", 2, 1e-4, 5e7)))
TIGHT = dataclasses.replace(SLOW, device=dataclasses.replace(CPU.device, memory=1.75e9))


def config(overrides):
    return load_config(overrides=overrides)


@pytest.mark.parametrize("machine", [CPU, SLOW], ids=["fast", "slow"])
def test_the_best_of_all_that_four_ranks_can_do(machine):
    """Every configuration, written down here once more, predicted one by one."""
    found = search(config(SMALL), 4, machine, top=7)
    everything = []
    for (data, pipeline, box), recompute, method in itertools.product(
        all_grids(4), ("none", "attention", "block"), ("ddp", "zero1", "zero2", "zero3")
    ):
        if data == 1 and method != "ddp":
            continue
        schedules = {1: [("1f1b", 0)], 2: [("1f1b", 0), ("interleaved", 2), ("zb-h1", 0), ("zb-v", 0)],
                     4: [("1f1b", 0), ("zb-h1", 0)]}[pipeline]  # fmt: skip
        for microbatches, (schedule, virtual_stages) in itertools.product((1, 2, 4, 8), schedules):
            if 8 // data % microbatches == 0:
                grid = [f"grid.data={data}", f"grid.pipeline={pipeline}", f"grid.tensor={list(box)}"]
                order = [f"pipeline.schedule={schedule}", f"pipeline.virtual_stages={virtual_stages}"]
                rest = [f"train.recompute={recompute}", f"data_parallel.method={method}"]
                whole = config([*SMALL, *grid, *order, *rest, f"train.microbatches={microbatches}"])
                everything.append(predict(whole, machine).seconds)
    assert [each.seconds for each in found] == sorted(everything)[:7]
    for each in found:
        assert predict(planned(config(SMALL), each), machine) == each


@pytest.mark.parametrize(
    ("job", "ranks", "machine"),
    [(SMALL, 8, SLOW), (LONG, 6, CPU), (LARGE, 8, TIGHT), ([*SMALL, "tensor.algorithm=cannon"], 8, SLOW),
     ([*LONG, "grid.data=[1, 2, 2]"], 8, SLOW),
     ([*LONG, "data_parallel.method=local_sgd", "train.optimizer=sgd"], 4, SLOW)],
)  # fmt: skip
def test_bounds_lose_nothing(job, ranks, machine):
    """Of every choice, bounds are below what the simulation says, and the best that fit are the search's."""
    job, given = jobs.read(config(job))
    tried = Search(Estimator(job, machine), given, ranks)
    everything = []
    for layout in tried.layouts:
        bound = tried.layout_bound(layout)
        for choice in choices(job, given, layout):
            estimate = tried.estimator.estimate(choice)
            assert bound <= estimate.seconds, choice
            assert tried.choice_bound(choice) <= estimate.seconds, choice
            if estimate.memory <= machine.device.memory:
                everything.append((estimate.seconds, choice))
    best = tried.best(5)
    assert [(estimate.seconds, choice) for estimate, choice in best] == sorted(everything)[:5]
    assert tried.simulated < len(everything) / 4  # and most were never simulated


def test_memory_leaves_something_out():
    """The case above is one in which the fastest choices do not fit."""
    fits, unlimited = (search(config(LARGE), 8, machine, 1)[0] for machine in (TIGHT, SLOW))
    assert unlimited.memory_bytes > TIGHT.device.memory
    assert fits.seconds > unlimited.seconds


def test_nothing_fits():
    tiny = dataclasses.replace(CPU, device=dataclasses.replace(CPU.device, memory=2**29))
    with pytest.raises(ValueError, match="no plan fits") as error:
        search(config(LARGE), 4, tiny)
    needs, more = re.search(
        r"is 0\.50 GiB, and the leanest choice needs (\S+) GiB, (\S+) GiB more", str(error.value)
    ).groups()
    assert float(needs) - 0.5 == pytest.approx(float(more), abs=0.011)
    enough = dataclasses.replace(tiny, device=dataclasses.replace(CPU.device, memory=(float(needs) + 0.01) * 2**30))
    assert search(config(LARGE), 4, enough)
    assert "train.recompute=block" in str(error.value)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (0, "--ranks and --top must be at least 1, got 0 and 5"),
        (97, "no grid of 97 ranks leaves work for all: there are 8"),
    ],
)
def test_ranks_that_cannot_be_used(ranks, message):
    job = SMALL if ranks == 0 else [*SMALL, "tensor.algorithm=cannon"]
    with pytest.raises(ValueError, match=message):
        search(config(job), ranks, CPU)


def test_what_would_change_the_choice():
    found = search(config(LONG), 8, SLOW, 9)
    lines = changes(found)
    assert len(lines) == 8
    told = [(re.search(r"where (\w+) takes (\S+) times", line), other) for line, other in zip(lines, found[1:])]
    told = [(match, other) for match, other in told if match]
    assert told
    for match, other in told:
        name, factor = match[1], float(match[2])
        grown = [each.seconds + (factor + 0.02 - 1) * each.parts[name] for each in (found[0], other)]
        assert grown[0] > grown[1]


def test_large_numbers_of_ranks_take_no_long_search():
    """The bounds leave little to simulate, and no schedule is larger than it must be."""
    big = ["model.layers=24", "model.width=8192", "model.heads=64", "train.batch=512", "model.context=2048",
           "precision.compute=bf16", "model.vocabulary=51200"]  # fmt: skip
    job, given = jobs.read(config(big))
    tried = Search(Estimator(job, Machine.load("frontier")), given, 128)
    best = tried.best(2)
    assert math.prod(best[0][1][:5]) == 128
    assert tried.simulated < 100


def test_the_command_writes_a_configuration(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text("[train]\nbatch = 12\n")
    command = ["plan", "job.toml", "--ranks", "6", "--machine", "cpu-cluster", "--top", "3", "-o", "best.toml"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found) == 3
    assert [each["seconds"] for each in found] == sorted(each["seconds"] for each in found)
    made = load_config("best.toml")
    assert made.ranks == 6
    assert made.train.batch == 12
    assert dataclasses.asdict(predict(made, "cpu-cluster")) == found[0]
    assert main(command) == 0
    assert "best.toml: the configuration of the best one" in capsys.readouterr().out
    assert main(["plan", "--machine", "cpu-cluster"]) == 2


def test_divisors():
    assert [divisors(n) for n in (1, 7, 16, 36)] == [
        [1], [1, 7], [1, 2, 4, 8, 16], [1, 2, 3, 4, 6, 9, 12, 18, 36]
    ]  # fmt: skip
