"""The search finds what trying everything finds; what it leaves out is proven to be slower."""

import dataclasses
import itertools
import json
import math
import re

import pytest

from hpctrain.choices import RECOMPUTE
from hpctrain.cli import main
from hpctrain.config import load_config
from hpctrain.grid_shape import all_grids
from hpctrain.plan import Machine, changes, planned, predict, search
from hpctrain.plan import job as jobs
from hpctrain.plan.bounds import Bounds
from hpctrain.plan.estimator import Estimator
from hpctrain.plan.machine import Link, Measured
from hpctrain.plan.search import Search
from hpctrain.plan.space import divisors, ways

SMALL = ["model.layers=4", "model.width=256", "model.heads=4", "train.batch=8", "model.context=64"]
SHORT = ["model.layers=4", "model.width=64", "model.heads=4", "train.batch=16", "model.context=32",
         "model.vocabulary=64"]  # fmt: skip
LONG = ["model.layers=8", "model.width=128", "model.heads=8", "train.batch=24", "model.context=512"]
LARGE = [
    "model.layers=12",
    "model.width=2048",
    "model.heads=16",
    "train.batch=12",
    "model.context=128",
    "model.tied=false",
    "checkpoint.background=false",
]
CPU = Machine.load("cpu-cluster")
SLOW = dataclasses.replace(CPU, link=(Link("a", 1, 2e-5, 2e8), Link("b", 2, 1e-4, 5e7)))
# Of few bytes and of many it takes longer than in proportion, so that one large microbatch is no bound for small ones.
STEEP = Measured("all_gather", 2, (1e3, 3e4, 1e6), (1e-3, 2e-5, 1e-1))
MEASURED = dataclasses.replace(SLOW, measured=(STEEP,))
# Four ranks on two cores, whose weights no cache holds.
CROWDED = dataclasses.replace(
    CPU, node=2, link=SLOW.link[:1], software=dataclasses.replace(CPU.software, accumulates=True),
    device=dataclasses.replace(CPU.device, state_bandwidth=CPU.device.bandwidth / 4, delay=0.2),
).crowded(4)  # fmt: skip
HEAVY = ["model.layers=5", "model.width=64", "model.heads=4", "train.batch=4", "model.context=32",
         "model.vocabulary=5000"]  # fmt: skip
MIXED = ["model.kind=mixtral", "model.layers=3", "model.width=128", "model.heads=4", "train.batch=4",
         "model.context=32", "model.experts=4", "model.dense_layers=1", "model.router=sigmoid"]  # fmt: skip
LEAN, TIGHT = (
    dataclasses.replace(SLOW, device=dataclasses.replace(CPU.device, memory=memory)) for memory in (3.1e9, 1.75e9)
)


def config(overrides):
    return load_config(overrides=overrides)


# Beside agarwal, which a box always allows; megatron is the same on (t, 1, 1), and two_half_d as cannon where z is 1.
ALSO = {
    (2, 1, 1): ["summa"], (1, 2, 1): ["summa"], (1, 1, 2): ["two_half_d"], (4, 1, 1): ["summa"], (1, 4, 1): ["summa"],
    (1, 1, 4): ["two_half_d"], (2, 2, 1): ["cannon", "summa"],
}  # fmt: skip


def test_the_best_of_all_that_four_ranks_can_do():
    """Every configuration, written down here once more, predicted one by one."""
    small, machine = [*SMALL, "train.batch=4"], SLOW
    estimator = Estimator(jobs.read(config(small))[0], machine)
    found = search(config(small), 4, machine, top=7)
    everything = []
    for (data, pipeline, box), recompute, method in itertools.product(
        all_grids(4, sequence=True), ("none", "attention", "block"), ("ddp", "zero1", "zero2", "zero3")
    ):
        if math.prod(data) == 1 and method != "ddp":
            continue
        schedules = {1: [("1f1b", 0)], 2: [("1f1b", 0), ("interleaved", 2), ("zb-h1", 0), ("zb-v", 0)],
                     4: [("1f1b", 0), ("zb-h1", 0)]}[pipeline]  # fmt: skip
        for microbatches, (schedule, virtual_stages), algorithm in itertools.product(
            (1, 2, 4), schedules, ["agarwal", *ALSO.get(box, [])]
        ):
            if 4 // data[0] % microbatches == 0:
                grid = [f"grid.data={list(data)}", f"grid.pipeline={pipeline}", f"grid.tensor={list(box)}"]
                order = [f"pipeline.schedule={schedule}", f"pipeline.virtual_stages={virtual_stages}"]
                rest = [f"train.recompute={recompute}", f"data_parallel.method={method}"]
                rest += [f"tensor.algorithm={algorithm}", f"train.microbatches={microbatches}"]
                whole = config([*small, *grid, *order, *rest])
                everything.append(estimator.estimate(jobs.read(whole)[1]).seconds)
    assert [each.seconds for each in found] == sorted(everything)[:7]
    for each in found:
        assert predict(planned(config(small), each), machine) == each


def test_a_heavy_end_has_fewer_layers():
    """Of 8 layers of width 64, a projection onto 5,000 words takes as much as 5: the last stage's are fewer."""
    job = [*LONG[:1], "model.width=64", *LONG[2:4], "model.context=64", "model.vocabulary=5000"]
    job += ["grid.pipeline=2", "train.microbatches=12"]
    best = search(config(job), 2, CPU, keep=("grid.pipeline", "train.microbatches", "pipeline.schedule"), top=2)
    assert best[0].settings["pipeline.partition"] == [7, 1]
    made = planned(config(job), best[0])
    assert made.pipeline.partition == [7, 1]
    assert predict(made, CPU) == best[0]


def test_what_is_kept_stays():
    job = [*SMALL, "grid.tensor=[2,2,1]", "tensor.algorithm=summa", "data_parallel.method=zero1"]
    keep = ("grid.tensor", "tensor.algorithm", "data_parallel.method")
    for found in search(config(job), 8, SLOW, keep=keep):
        assert found.settings["grid.tensor"] == [2, 2, 1]
        assert found.settings["tensor.algorithm"] == "summa"
        assert found.settings["data_parallel.method"] == "zero1"
    with pytest.raises(ValueError, match="--keep takes settings that a search changes: grid.data, .*; got model.width"):
        search(config(job), 8, SLOW, keep=("model.width",))
    with pytest.raises(ValueError, match="and grid.tensor to be kept"):
        search(config(job), 6, SLOW, keep=("grid.tensor",))


def test_slices_are_those_that_were_searched():
    """As many as the configuration's pipeline has ranks, whatever pipeline is found."""
    config = load_config(overrides=[*SHORT, "pipeline.schedule=terapipe", "grid.pipeline=4"])
    (best,) = search(config, 2, CPU, top=1)
    assert len(best.settings["pipeline.slices"]) == 4
    assert predict(planned(config, best), CPU) == best


def test_microbatches_that_are_kept_need_not_be_even():
    settings = [*SHORT, "train.batch=10", "train.microbatches=4"]
    (best,) = search(load_config(overrides=settings), 1, CPU, top=1, keep=("train.microbatches",))
    assert best.settings["train.microbatches"] == 4
    assert best.seconds <= predict(load_config(overrides=settings), CPU).seconds
    with pytest.raises(ValueError, match="no layout has what is to be kept: train.microbatches"):
        search(load_config(overrides=[*settings, "train.batch=3"]), 1, CPU, keep=("train.microbatches",))


def test_precisions_that_are_allowed():
    """Of each precision's best ones the best; bfloat16 moves half of the bytes, and multiplies no faster here."""
    machine = dataclasses.replace(SLOW, peak=SLOW.peak | {"bf16": SLOW.peak["fp32"]})
    allowed = search(config(SMALL), 4, machine, top=6, precisions=("fp32", "bf16", "fp64"))
    each = [
        (found.seconds, found.settings["precision.compute"])
        for name in ("fp32", "bf16", "fp64")
        for found in search(config([*SMALL, f"precision.compute={name}"]), 4, machine, top=6)
    ]
    assert [(found.seconds, found.settings["precision.compute"]) for found in allowed] == sorted(each)[:6]
    assert {found.settings["precision.compute"] for found in allowed} != {"fp32"}
    assert predict(planned(config(SMALL), allowed[0]), machine) == allowed[0]
    with pytest.raises(ValueError, match="machine cpu-cluster has no peak.bf16"):
        search(config(SMALL), 4, SLOW, precisions=("fp32", "bf16"))
    with pytest.raises(ValueError, match='--precision must be "fp32" or'):
        search(config(SMALL), 4, SLOW, precisions=("int8",))


def test_experts_that_ranks_divide():
    """Searched are the grids whose ranks do so as they are given to; of three experts four ranks have what they say."""
    grid = ["grid.data=4", "grid.expert=4", "grid.expert_tensor=2"]
    job, given = jobs.read(config([*MIXED, "model.layers=4", "model.experts=3", *grid]))
    tried = Search(Estimator(job, CPU), given, 4)
    found = [way for grid in tried.grids for layout in tried.layouts(grid) for way in ways(job, given, layout)]
    assert {way.expert for way in found} == {2, 4}
    assert {way.settings["grid.expert_tensor"] for way in found} == {2}
    assert {way.pipeline for way in found} == {1, 2}  # not 4, whose stages have one rank
    parts = {1: 1, 2: 1, 4: 3 / 4}  # of an expert, on the rank that has the most
    for each, experts in parts.items():
        held = tried.estimator.expert_elements(given._replace(expert_tensor=each), (1, 0))
        assert held == experts * job.costs.expert_weights


@pytest.mark.parametrize(
    ("job", "ranks", "machine"),
    [(SMALL, 8, SLOW), ([*LONG, "train.batch=6"], 6, CPU), (LARGE, 4, LEAN), (MIXED, 4, SLOW), (SMALL, 4, MEASURED),
     (HEAVY, 4, CPU), (SMALL, 4, CROWDED),
     ([*LONG, "data_parallel.method=local_sgd", "train.optimizer=sgd", "train.batch=6"], 4, SLOW),
     ([*MIXED, "model.aux_loss=0.1", "model.aux_scope=step"], 4, SLOW),
     ([*SMALL, "pipeline.schedule=gpipe"], 4, SLOW), ([*SMALL, "pipeline.schedule=dualpipev"], 4, SLOW)],
)  # fmt: skip
def test_bounds_lose_nothing(job, ranks, machine):
    """Of every choice, bounds are below what the simulation says, and the best that fit are the search's."""
    job, given = jobs.read(config(job))
    tried = Search(Estimator(job, machine), given, ranks)
    everything = []
    bounds, count = tried.bounds, 0
    for grid in tried.grids:
        of_grid = max(bounds.grid(grid), bounds.layouts(grid))
        for layout in tried.layouts(grid):
            of_layout, lean = max(of_grid, bounds.layout(layout)), bounds.lean(layout)
            for way in ways(job, given, layout):
                of_way = bounds.way(way)
                for choice in tried.choices(way):
                    estimate = tried.estimator.estimate(choice)
                    count += 1
                    assert of_layout <= estimate.seconds, choice
                    assert bounds.choice(choice) <= estimate.seconds, choice
                    if estimate.memory <= machine.device.memory:
                        assert lean is not None, choice
                        assert RECOMPUTE.index(choice.recompute) >= RECOMPUTE.index(lean.recompute), choice
                        assert bounds.layout(lean) <= estimate.seconds, choice
                        assert of_way <= estimate.seconds, choice
                        everything.append((estimate.seconds, choice))
    assert count == len(list(tried.everything()))
    best = tried.best(5)
    assert [found[:2] for found in best] == sorted(everything)[:5]
    assert tried.simulated < len(everything) / (4 * machine.share)  # and most were never simulated


def test_what_the_fullest_rank_holds_at_least():
    """Of 6 layers on 2 ranks, 1F1B has 3 twice; ZB-V, which is the last to be tried, 4 times 2 and once 1."""
    job, given = jobs.read(config([*SMALL, "model.layers=6"]))
    assert Bounds(Estimator(job, CPU), given, 2).in_flight(2, 4) == (3, 6)


def test_memory_leaves_something_out():
    """The case above is one in which the fastest choices do not fit."""
    fits, unlimited = (search(config(LARGE), 8, machine, 1)[0] for machine in (TIGHT, SLOW))
    assert unlimited.memory_bytes > TIGHT.device.memory
    assert fits.seconds > unlimited.seconds
    below = dataclasses.replace(SLOW, device=dataclasses.replace(SLOW.device, memory=unlimited.memory_bytes - 1))
    assert search(config(LARGE), 8, below, 1)[0].memory_bytes < unlimited.memory_bytes


def test_nothing_fits():
    tiny = dataclasses.replace(CPU, device=dataclasses.replace(CPU.device, memory=2**29))
    with pytest.raises(ValueError, match="no plan fits") as error:
        search(config(LARGE), 4, tiny)
    needs, more = re.search(
        r"is 0\.50 GiB, and the leanest choice needs (\S+) GiB, (\S+) GiB more", str(error.value)
    ).groups()
    assert float(needs) - 0.5 == pytest.approx(float(more), abs=0.011)
    job, given = jobs.read(config(LARGE))
    tried = Search(Estimator(job, tiny), given, 4)
    assert float(needs) == pytest.approx(min(map(tried.estimator.memory.of, tried.everything())) / 2**30, abs=0.006)
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
    keep = ("tensor.algorithm",) if ranks else ()
    with pytest.raises(ValueError, match=message):
        search(config([*SMALL, "tensor.algorithm=cannon"]), ranks, CPU, keep=keep)


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
    assert best[0][1].ranks == 128
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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("job.toml --predict --ranks 0 --top 1", "--predict does not go with --ranks, --top; leave out the one or the"),
        ("job.toml --predict --keep grid.tensor --precision bf16 -o a.toml", "with --precision, --keep, -o; leave"),
        ("job.toml --show attention --ranks 4", "--show does not go with --ranks"),
        ("job.toml --show attention --predict", "--show does not go with --predict"),
        ("job.toml --predict --plot a.png", "--plot draws --show attention, got no --show"),
        ("job.toml run.steps=3 --learn runs/a", "--learn does not go with CONFIG.toml, section.key=value"),
        ("--learn runs/a --json", "--learn does not go with --json"),
        ("job.toml --machines", "--machines does not go with CONFIG.toml"),
    ],
)
def test_options_that_would_change_nothing_are_refused(tmp_path, capsys, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text("")
    assert main(["plan", *words.split(), "--machine", "cpu-cluster"]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["job.toml"]


def test_divisors():
    assert [divisors(n) for n in (1, 7, 16, 36)] == [
        [1], [1, 7], [1, 2, 4, 8, 16], [1, 2, 3, 4, 6, 9, 12, 18, 36]
    ]  # fmt: skip
