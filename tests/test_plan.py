"""What a step costs by formula: machines, the network's levels, products, pipelines and memory."""

import dataclasses
import json
import re
import subprocess
import sys

import pytest

from hpctrain import plan
from hpctrain.cli import main
from hpctrain.config import load_config
from hpctrain.pipeline import Costs
from hpctrain.plan import Machine, pipelines, predict, step_traffic
from hpctrain.plan.machine import Link
from hpctrain.plan.network import Group, Network

MACHINES = """alps-gh200 cpu-cluster dgx-a100-4hdr dgx-a100-4x100 dgx-a100-selene dgx-h100 frontier lumi-g
    perlmutter-a100-40 perlmutter-a100-80"""
BASE = ["model.layers=8", "model.width=512", "model.heads=8", "train.batch=32", "model.context=128"]


def machine(**changes):
    return dataclasses.replace(Machine.load("cpu-cluster"), **changes)


def changed(table, **changes):
    return {table: dataclasses.replace(getattr(Machine.load("cpu-cluster"), table), **changes)}


def config(*overrides):
    return load_config(overrides=[*BASE, *overrides])


def test_machines_by_name():
    assert plan.names() == MACHINES.split()
    for name in plan.names():
        found = Machine.load(name)
        assert found.name == name
        assert found.node == found.link[1].unit
        assert {"fp64", "fp32"} <= set(found.peak)


@pytest.mark.parametrize("name", MACHINES.split())
def test_figures_have_units_and_sources(name):
    sourced = {"memory", "reserved", "slack", "product", "attention", "launch", "power", "latency", "noise", "relative"}
    path = plan.machine.resources.files("hpctrain.plan") / "machines" / f"{name}.toml"
    found = set()
    for line in path.read_text().splitlines():
        key, _, value = line.partition(" = ")
        found.add(key)
        assert key not in sourced or re.search(r" # .+[;:] .+", value), line
        assert key != "bandwidth" or " # B/s" in value, line
    assert sourced < found


@pytest.mark.parametrize(
    ("text", "replacement", "message"),
    [
        ("memory = 4e9", "", r"here\.toml: device.memory is missing \(memory: B\); .*cluster.toml has every figure"),
        ("launch = 5e-6", "", r"device.launch is missing \(launch: s that an operation takes besides\)"),
        ("memory = 4e9", "memory = true", "device.memory must be float, got True"),
        ("memory = 4e9", "memory = -1", "device.memory must be finite and at least 0, got -1"),
        ("memory = 4e9", "memory = 0", "device.memory must be above 0, got 0"),
        ("memory = 4e9", "memry = 4e9", "unknown figure device.memry; known are memory"),
        ("node = 64", "node = 1.5", "node must be int, got 1.5"),
        ("unit = 64", "unit = 1", r"link.unit must be 1 on the first level and rise from there, got \[1, 1\]"),
        ("bandwidth = 11.5e9", "bandwidth = 0", "link.100 Gb/s.bandwidth must be above 0"),
        ("bandwidth = 11.5e9", "direct = 1.5\nbandwidth = 11.5e9", "link.100 Gb/s.direct must be at most 1, got 1.5"),
        ("bandwidth = 11.5e9", "direct = 0\nbandwidth = 11.5e9", "link.100 Gb/s.direct must be above 0, got 0"),
        ("slack = 0.05", "slack = 20", "device.slack must be at most 1, got 20"),
        ("hidden_data = 0.0", "hidden_data = 7", "software.hidden_data must be at most 1, got 7"),
        ("relative = 0.25", "relative = 3", "errors.relative must be at most 1, got 3"),
        ("fp32 = 140e9", "fp32 = 140e9\nbf61 = 1e12", r"a figure of .peak. must be .* or .bf16. .*, got .bf61."),
        ("attended = 0.5", 'whole_norms = ["blok"]', "software.whole_norms must be .* or .block., got .blok."),
        ("[errors]", "[learned]\ncompute = 0\n[errors]", "learned.compute must be above 0, got 0.0; delete the line"),
        (
            "[errors]",
            '[[measured]]\noperation = "allreduce"\nranks = 2\nbytes = [1, 2]\nseconds = [1, 2]\n[errors]',
            "measured.operation must be .* or .all_reduce. .*, got .allreduce.",
        ),
        ("fp32 = 140e9", "", "machine here has no peak.fp32 .flop/s., which precision.compute = fp32 needs"),
    ],
)
def test_wrong_figures(tmp_path, text, replacement, message):
    source = (plan.machine.resources.files("hpctrain.plan") / "machines" / "cpu-cluster.toml").read_text()
    assert text in source
    (tmp_path / "here.toml").write_text(source.replace(text, replacement, 1))
    with pytest.raises(ValueError, match=message):
        predict(config(), Machine.load(tmp_path / "here.toml"))


def test_an_unknown_machine():
    with pytest.raises(ValueError, match="there is no machine 'dgx-h10'; did you mean dgx-h100"):
        Machine.load("dgx-h10")
    with pytest.raises(OSError, match=r"absent\.toml"):
        Machine.load("absent.toml")


# Nodes of 4 ranks, groups of 8: 10 B/s and 1 s a hop of a rank, 20 and 2 of a node, 20 and 4 of a group
LEVELS = (Link("a", 1, 1.0, 10.0), Link("b", 4, 2.0, 20.0), Link("c", 8, 4.0, 20.0))


@pytest.mark.parametrize(
    ("size", "stride", "latency", "per_byte"),
    [
        (4, 1, 3, 0.1),  # in a node
        (2, 4, 2, 4 / 20),  # two nodes, all four ranks of each in rings of their own
        (8, 1, 6 + 2, 0.1),  # two nodes, one ring: it has all 20
        (4, 2, 2 + 2, 0.1),  # two nodes of two members each
        (16, 1, 12 + 2 * 2 + 4, 0.1),  # two groups
        (2, 8, 4, 8 / 20),
        (4, 4, 2 * 2 + 4, 4 / 20),  # of a group two members: 8 / 40
        (3, 4, 2 + 4, 4 / 20),  # the last group has one
    ],
)
def test_a_ring_on_levels(size, stride, latency, per_byte):
    """All-gather: latency of every hop, and (p-1)/p of the bytes at the pace of the slowest level."""
    net = Network(machine(link=LEVELS))
    group = Group(size, stride)
    assert net.all_gather(size * 100, group) == pytest.approx(latency + (size - 1) * 100 * per_byte)
    assert net.reduce_scatter(size * 100, group) == net.all_gather(size * 100, group)
    assert net.all_gather(100, Group(1, stride)) == net.all_gather(0, group) == 0


def test_groups_that_are_linked_in_pairs():
    """A fourth of a group's 20 B/s leads to one other group: rings and messages have it, all-to-alls have all."""
    near, node, group = LEVELS
    net = Network(machine(link=(near, node, dataclasses.replace(group, direct=0.25))))
    assert net.all_gather(1600, Group(16)) == pytest.approx(12 + 2 * 2 + 4 + 1500 / 5)
    assert net.all_gather(200, Group(2, 8)) == pytest.approx(4 + 100 * 8 / 5)
    assert net.message(100, 8) == pytest.approx(4 + 100 * 8 / 5)
    assert net.all_gather(800, Group(8)) == pytest.approx(8 + 700 / 10)  # in one group
    assert net.all_to_all(8e6, Group(16)) == Network(machine(link=LEVELS)).all_to_all(8e6, Group(16))


def test_other_operations():
    net = Network(machine(link=LEVELS, **changed("software", asynchronous=True)))
    assert net.all_reduce(8e6, Group(8)) == pytest.approx(2 * (8 + 7e6 * 0.1))  # a ring
    assert net.all_reduce(1e-9, Group(16)) == pytest.approx(2 * 4 * 4)  # a tree of four levels
    assert [net.message(100, distance) for distance in (1, 4, 8)] == [1 + 10, 2 + 20, 4 + 40]
    # of 8 ranks on two nodes each sends 4/8 of its bytes to the other node, through a fourth of its 20 B/s
    assert net.all_to_all(8e6, Group(8)) == pytest.approx(6 + 2 + 8e6 * 4 / 8 * 4 / 20)
    # or 8 / 2 of them to one rank of the other node in each of three rounds
    assert net.all_to_all(8, Group(8)) == pytest.approx(3 * (2 + 4 * 4 / 20))


def test_launches_around_an_exchange():
    """Of three operations, where they are not queued ahead; SUMMA's panels of four ranks are four exchanges."""
    queued, eager = (Network(machine(link=LEVELS, **changed("software", asynchronous=each))) for each in (True, False))
    launches = 3 * machine().device.launch
    for name in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcasts"):
        assert getattr(eager, name)(100, Group(1)) == 0
        added = getattr(eager, name)(100, Group(4)) - getattr(queued, name)(100, Group(4))
        assert added == pytest.approx(launches * (4 if name == "broadcasts" else 1), rel=1e-6)
    assert eager.message(100, 1) - queued.message(100, 1) == pytest.approx(launches, rel=1e-6)


def test_panels_of_summa():
    """Each of 4 parts in two rounds; Cannon's go directly."""
    net = Network(machine(link=LEVELS))
    assert net.broadcasts(400, Group(4)) == pytest.approx(2 * (4 * 1 + 400 * 0.1))
    assert net.broadcasts(400, Group(1)) == 0
    cannon, summa = (
        predict(config("grid.tensor=[4,4,1]", f"tensor.algorithm={name}"), machine(link=LEVELS)).parts["tensor"]
        for name in ("cannon", "summa")
    )
    assert summa > 2 * cannon


def test_heads_that_do_not_divide():
    """Of 6 heads over 4 Ulysses ranks the fullest has two, a third more than its share."""
    job = ["model.heads=6", "model.width=384", "model.context=4096", "train.batch=4"]
    even, uneven = (
        predict(config(*job, f"grid.data=[1, 1, {ranks}]"), machine(**changed("errors", noise=0.0))).parts["compute"]
        for ranks in (3, 4)
    )
    assert uneven > 0.85 * even


def test_a_flat_product_is_slow():
    from hpctrain.plan.job import read
    from hpctrain.plan.passes import Box

    job, choice = read(config())
    made = machine(peak={"fp32": 1e9}, **changed("device", bandwidth=1e6, product=0.5, launch=0.0))
    box = Box(job, made, Network(made), choice)
    assert box.product(10, 20, 30) == pytest.approx(12000 / 0.5e9 + 4 * (200 + 600 + 300) / 1e6)


def test_parts_make_up_the_seconds():
    found = predict(config("grid.data=2", "grid.pipeline=2", "grid.tensor=[2,2,1]", "train.microbatches=4"), machine())
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    assert found.low < found.seconds < found.high
    assert found.fits
    assert found.bound_by == max(found.parts, key=found.parts.get)
    for part in ("compute", "data", "tensor", "bubble", "optimizer", "reading", "stragglers"):
        assert found.parts[part] > 0, part


@pytest.mark.parametrize(
    "settings",
    [
        ["grid.data=2", "grid.pipeline=2", "grid.tensor=[2,1,1]", "train.microbatches=4"],
        ["grid.pipeline=4", "pipeline.schedule=interleaved", "train.microbatches=4", "data_parallel.method=zero2"],
        ["grid.pipeline=2", "pipeline.schedule=zb-v", "train.microbatches=4", "precision.compute=fp64"],
        ["grid.tensor=[2,2,1]", "tensor.algorithm=cannon"],
        ["grid.tensor=[2,2,1]", "train.recompute=block"],
    ],
)
def test_bytes_are_those_of_the_formula(settings):
    """Of the busiest rank; `step_traffic` itself equals the ledger (tests/test_traffic.py)."""
    from hpctrain.config.checks import pipeline_schedule
    from hpctrain.scale.work import costs

    made = config(*settings)
    itemsize = 8 if made.precision.compute == "fp64" else 4
    each = [
        step_traffic(
            costs(made), made.grid_shape, 32, pipeline_schedule(made), itemsize, rank, made.tensor.algorithm,
            made.tensor.overlap, None, made.data_parallel.method, recompute=made.train.recompute,
        )
        for rank in range(made.grid_shape["pipeline"])
    ]  # fmt: skip
    assert predict(made, machine()).bytes == max(each, key=lambda axes: sum(axes.values()))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipev"])
def test_a_long_pipeline_goes_on_in_rounds(name, monkeypatch):
    """Its time by two short ones is that of the whole simulation, whichever stage is the slowest."""
    virtual = 2 if name in ("interleaved", "zb-v", "dualpipev") else 0
    stages = 4 * max(1, virtual)
    for slow in (0, 2, stages - 1):
        times = [1.3 if s == slow else 1.0 for s in range(stages)]
        costs = Costs(times, times, times, reduce=0.5, update=0.1, latency=[0.05] * (stages - 1))
        exact = pipelines.makespan(name, 4, 37, virtual, costs)
        with monkeypatch.context() as patch:
            patch.setattr(pipelines, "LARGEST", 1)
            assert len(pipelines.simulated(name, 4, 37, virtual)) == 2
            assert pipelines.makespan(name, 4, 37, virtual, costs) == pytest.approx(exact, rel=1e-12)
    assert pipelines.in_flight(name, 4, 37, virtual) == pipelines.shape(name, 4, 37, virtual).in_flight
    if name == "1f1b":
        assert pipelines.in_flight(name, 4, 37, virtual) == [{0: 4}, {1: 3}, {2: 2}, {3: 1}]


def test_sums_in_buckets():
    """Each bucket passes the whole ring, and ZeRO-3 gathers each block by itself; sums hide behind the last backward,
    gathers of weights behind the first forward."""

    def data(bucket=0.0, hidden=0.0, method="zero1", bandwidth=1e9):
        software = changed("software", bucket=bucket, hidden_data=hidden, asynchronous=True)
        made = machine(link=(Link("a", 1, 1e-3, bandwidth),), **software)
        made = dataclasses.replace(made, errors=dataclasses.replace(made.errors, noise=0.0))
        return predict(config("grid.data=4", f"data_parallel.method={method}"), made).parts

    elements = 8 * (12 * 512**2 + 13 * 512) + (257 + 128 + 2) * 512
    whole = data()["data"]
    assert whole == pytest.approx(2 * 3e-3 + 2 * 3 / 4 * 4 * elements / 1e9, rel=1e-3)
    buckets = -(-4 * elements // 2**20)
    assert data(bucket=2**20)["data"] - whole == pytest.approx(2 * (buckets - 1) * 3e-3)
    assert data(method="zero3")["data"] > 3 * 8 * 3e-3
    # sums and gathers take half of the computation each: of a forward, a third, a sixth is left over
    compute = data()["compute"]
    assert data(hidden=1.0, bandwidth=6 * elements / compute)["data"] == pytest.approx(compute / 6, rel=0.15)


def test_what_waits_for_a_slow_stage_is_bubble():
    even = predict(config("grid.pipeline=2", "train.microbatches=8"), machine())
    uneven = predict(config("grid.pipeline=2", "train.microbatches=8", "pipeline.partition=[7, 1]"), machine())
    assert uneven.seconds > 1.3 * even.seconds


@pytest.mark.parametrize(
    ("settings", "states"),  # bytes a parameter, by hpctrain/data_parallel/README.md with sums in the type of compute
    [
        (["precision.compute=bf16", "precision.reduce=compute"], 16),
        (["precision.compute=bf16", "precision.reduce=compute", "data_parallel.method=zero1"], 4 + 12 / 4),
        (["precision.compute=bf16", "precision.reduce=compute", "data_parallel.method=zero2"], 2 + 14 / 4),
        (["precision.compute=bf16", "precision.reduce=compute", "data_parallel.method=zero3"], 16 / 4),
        (["precision.compute=bf16"], 18),
        ([], 16),
        (["train.optimizer=sgd"], 12),
        (["train.optimizer=sgd", "train.momentum=0"], 8),
        (["precision.compute=bf16", "train.ema_decay=0.999"], 22),
        (["precision.compute=bf16", "train.ema_decay=0.999", "data_parallel.method=zero3"], 22 / 4),
        (["precision.compute=fp64"], 32),
    ],
)
def test_states_of_a_parameter(settings, states):
    from hpctrain.plan.job import read
    from hpctrain.plan.memory import state_bytes

    job, choice = read(config("grid.data=4", *settings))
    assert state_bytes(job, choice.method, choice.data) == states


def test_memory_grows_with_what_is_in_flight():
    """Of 1F1B min(m, p) microbatches on the first rank, of GPipe all."""

    def of(*settings):
        return predict(config("grid.pipeline=4", "train.microbatches=16", *settings), machine()).memory_bytes

    cut = "pipeline.partition=[5, 1, 1, 1]"
    few, many = of(cut), of(cut, "pipeline.schedule=gpipe")
    block = 2 * 128 * 512 * 4 * (4 + 3 + 1 + 4 + 4)  # two sequences: norms' input and output, qkv, mixed, MLP
    assert many - few == pytest.approx(1.05 * 12 * (5 * block + 2 * 128 * 512 * 4), rel=1e-6)
    assert of(cut, "train.recompute=block") < few


def test_ranks_that_share_sequences():
    """Each has its part of the tokens and scores, all keep the same weights, and what travels is the formula's."""
    job = ["model.context=4096", "train.batch=4", "data_parallel.method=zero1"]
    whole, ring, ulysses = (
        predict(config(*job, f"grid.data={data}"), machine(**changed("errors", noise=0.0)))
        for data in ("1", "[1, 4, 1]", "[1, 1, 4]")
    )
    assert whole.parts["sequence"] == 0
    for cut in (ring, ulysses):
        assert cut.parts["compute"] == pytest.approx(whole.parts["compute"] / 4, rel=0.01)
        assert cut.parts["optimizer"] == pytest.approx(whole.parts["optimizer"] / 4)
        assert cut.parts["data"] > 0
    # a rank receives 6 times the keys of the other three, or 8 times its part of 3/4 of its own queries and keys
    rows, block = 4 * 1024, 8 * 4 * 512
    assert ring.bytes["sequence"] == 6 * 3 * rows * block
    assert ulysses.bytes["sequence"] == 8 * 3 * rows * block / 4
    ratio = ring.parts["sequence"] / ulysses.parts["sequence"]
    assert ratio == pytest.approx(ring.bytes["sequence"] / ulysses.bytes["sequence"], rel=0.01)
    assert ring.settings["grid.data"] == [1, 4, 1]


def test_measured_times_are_interpolated():
    table = plan.machine.Measured("all_gather", 2, (10.0, 1000.0), (1.0, 4.0))
    net = Network(machine(measured=(table,), **changed("software", asynchronous=True)))
    assert net.all_gather(100, Group(2)) == 2.0
    assert net.all_gather(100, Group(4)) != 2.0


def test_the_command(tmp_path, capsys):
    job = tmp_path / "job.toml"
    job.write_text("[grid]\ndata = 2\n")
    assert main(["plan", str(job), "--machine", "cpu-cluster", "--predict", "--json", "train.batch=16"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {f.name for f in dataclasses.fields(plan.Prediction)}
    assert found["settings"]["grid.data"] == 2
    assert main(["plan", str(job), "--machine", "cpu-cluster", "--predict"]) == 0
    assert "bound by compute" in capsys.readouterr().out
    assert main(["plan", str(job), "--predict", "--machine", "summit"]) == 2
    assert "there is no machine 'summit'" in capsys.readouterr().err


def test_neither_mpi_nor_torch():
    program = """
import sys
import hpctrain as ht
ht.plan.predict(ht.load_config(overrides=["grid.data=8", "grid.pipeline=4"]), "frontier")
print("torch" in sys.modules, "mpi4py" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False False\n", done.stderr
