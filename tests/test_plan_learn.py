"""Machine files: what is measured here becomes one, and runs set it right."""

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpctrain.cli import main
from hpctrain.config import load_config, to_toml
from hpctrain.plan import Machine, predict
from hpctrain.plan.describe import machine_toml
from hpctrain.plan.estimator import Estimator
from hpctrain.plan.job import read
from hpctrain.plan.learn import compare, learn, with_learned
from hpctrain.plan.machine import Learned
from hpctrain.plan.outcome import outcome
from hpctrain.report.run import read_job
from hpctrain.train import finishing

ATTENTION = (5e9, 2e-9), (8e9, 1e-9)  # flop/s and s of a score, of short and long sequences
PARTS = ("compute", "data", "tensor", "sequence", "pipeline", "bubble", "reading", "agreeing")


def figures(ranks, cores=2):
    """As `measure.measure` finds them: 10 GFLOP/s and 1 GB/s in products of float32, half of it in float64."""
    shapes = ((100, 100, 100), (10, 100, 1000), (64, 256, 64))
    rows = {
        name: [(m, k, n, slower * (2 * m * k * n / 1e10 + 4 * (m * k + k * n + m * n) / 1e9)) for m, k, n in shapes]
        for name, slower in (("fp32", 1), ("fp64", 2))
    }
    tables = {
        "all_gather": [(256, 2e-5), (4096, 3e-5)],
        "reduce_scatter": [(256, 2e-5), (4096, 3e-5)],
        "all_reduce": [(256, 2e-5), (4096, 3e-5)],
        "message": [(256, 1e-6), (4096, 4e-6)],
    }
    return {
        "ranks": ranks, "ranks_of_a_node": ranks, "cores": cores, "memory": 8e9 / ranks, "reserved": 2e8, "slack": 0.2,
        "products": rows, "elements": 2e9, "state": 1e9, "tables": 1e9, "cold": 2e9, "launch": 3e-6,
        "attention": [[(n, 4 * n / (4 * n / rate + score)) for n in (32, 64)] for rate, score in ATTENTION],
        "norms": 2e9, "activations": 5e8, "cache": 1e6,
        "delay": 0.1 * ranks,
        "reading": [(100, 3e-5), (1100, 1.1e-4)],
        "collectives": [(size, slowed(tables, 1 if size == ranks else 3)) for size in (2, 4) if ranks % size == 0],
        "between": [], "bucket": 1 << 20, "asynchronous": False,
    }  # fmt: skip


def slowed(tables, times):
    """Of groups that others disturb."""
    return {name: [(nbytes, times * taken) for nbytes, taken in rows] for name, rows in tables.items()}


def written(tmp_path, *found):
    path = tmp_path / "here.toml"
    path.write_text(machine_toml(found, "2026-01-01", "node7"))
    return path


def test_a_machine_file_of_figures(tmp_path):
    machine = Machine.load(written(tmp_path, figures(1), figures(2), figures(4)))
    assert machine.node == 2  # four share two cores
    assert machine.peak == {"fp32": 1e10, "fp64": 5e9}
    assert machine.device.operands == machine.crowded(4).device.operands == 1e9
    assert (machine.device.memory, machine.device.launch, machine.device.attention) == (4e9, 3e-6, 0.5)
    lengths = 64, 256, 512, 1024, 9999
    parts, scores = zip(*map(machine.device.attention_of, lengths))
    assert parts == pytest.approx([0.5, 0.5, 0.65, 0.8, 0.8])
    assert scores == pytest.approx([2e-9, 2e-9, 1.5e-9, 1e-9, 1e-9])
    assert machine.device.sample == pytest.approx(2.2e-5)  # and 80 ns a token of 8 bytes
    assert machine.device.reading == pytest.approx(1e8)
    assert machine.software.bucket == 1 << 20
    config = load_config()
    by_state, by_elements = (
        predict(config, replace(machine, occupied=(), device=replace(machine.device, state_bandwidth=rate))).parts[
            "optimizer"
        ]
        for rate in (machine.device.state_bandwidth, 0)
    )
    assert by_state == pytest.approx(2 * by_elements)  # at 1e9 B/s, not at 2e9
    names = "all_gather", "reduce_scatter", "all_reduce", "message"
    assert [(each.operation, each.ranks, each.at_once) for each in machine.measured] == [
        (name, size, ranks) for size, ranks in ((2, 2), (2, 4), (4, 4)) for name in names
    ]
    assert machine.link[0].bandwidth == 4096 / 4e-6


def test_groups_that_others_disturb(tmp_path):
    """Two ranks of four exchange as measured while the other two do; of six, as two alone, in a third of a core."""
    measured = Machine.load(written(tmp_path, figures(1), figures(2), figures(4)))
    taken = [
        {(each.operation, each.ranks): each.seconds[0] for each in measured.crowded(n).measured} for n in (2, 4, 6)
    ]
    assert [each["all_gather", 2] for each in taken] == pytest.approx([2e-5, 6e-5, 6e-5])
    assert [each["message", 2] for each in taken] == pytest.approx([1e-6, 3e-6, 3e-6])
    assert taken[1]["all_gather", 4] == pytest.approx(2e-5)


def test_ranks_that_share_cores_compute_in_turn(tmp_path):
    machine = Machine.load(written(tmp_path, figures(1), figures(2)))
    crowded = machine.crowded(6)
    assert crowded.device.product == machine.device.product / 3
    assert crowded.device.launch == 3 * machine.device.launch
    assert crowded.device.memory == machine.device.memory / 3
    assert crowded.device.optimizer_rate == machine.device.optimizer_rate / 3
    assert machine.crowded(2) == machine
    frontier = Machine.load("frontier")
    assert frontier.crowded(64) is frontier  # it has more nodes
    two, four = (predict(load_config(overrides=[f"grid.data={n}", "train.batch=8"]), machine) for n in (2, 4))
    assert four.parts["compute"] == pytest.approx(two.parts["compute"], rel=0.05)  # half the work, at half the rate


def test_one_rank_alone_has_no_messages_to_measure(tmp_path):
    machine = Machine.load(written(tmp_path, figures(1)))
    assert machine.measured == ()
    assert machine.link[0].latency == 1e-6


def run_folder(tmp_path, name, machine, factors, *overrides):
    """A run that took `factors` times what is predicted of each part."""
    folder = tmp_path / name
    folder.mkdir()
    config = load_config(overrides=["train.batch=8", *overrides])
    (folder / "config.toml").write_text(to_toml(config))
    parts = predict(config, machine).parts
    time = dict.fromkeys(PARTS, 0.0)
    time["compute"] = factors["compute"] * (parts["compute"] + parts["optimizer"])
    for part in ("data", "tensor", "bubble"):
        time[part] = factors.get(part, 1) * parts[part]
    step = {"step": 1, "loss": 6.0, "tokens": 100, "tokens_per_second": 1.0}
    records = [{**step, "seconds": 99.0, "time": dict.fromkeys(PARTS, 99.0)}] * 2
    records += [{**step, "seconds": sum(time.values()), "time": time}] * 3
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_runs_set_a_machine_right(tmp_path):
    path = written(tmp_path, figures(1), figures(2))
    machine = Machine.load(path)
    runs = [
        run_folder(tmp_path, "a", machine, {"compute": 1.5, "data": 4}, "grid.data=2"),
        run_folder(tmp_path, "b", machine, {"compute": 2.5, "tensor": 3}, "grid.tensor=2"),
        run_folder(tmp_path, "c", machine, {"compute": 2.0}),
    ]
    jobs = {folder.name: read_job(folder) for folder in runs}
    after, found = learn(machine, jobs)
    assert after.learned.compute == after.learned.optimizer == pytest.approx(2.0)
    assert (after.learned.data, after.learned.tensor) == (pytest.approx(4), pytest.approx(3))
    predicted, measured = found["a"]["compute"]
    assert measured == pytest.approx(1.5 * predicted)
    # and what was learned is predicted
    config, records = jobs["a"]
    predicted, measured = compare(config, after, records)["data"]
    assert measured == pytest.approx(predicted)
    again, _ = learn(after, jobs)
    assert vars(again.learned) == pytest.approx({**vars(after.learned), "runs": 6})


def test_the_command_writes_what_it_learned(tmp_path, capsys):
    path = written(tmp_path, figures(1), figures(2))
    folder = run_folder(tmp_path, "a", Machine.load(path), {"compute": 3.0}, "grid.data=2")
    assert main(["plan", "--learn", str(folder), "--machine", str(path)]) == 0
    assert "3.00 times" in capsys.readouterr().out
    assert Machine.load(path).learned == Learned(compute=3.0, optimizer=3.0, data=1.0, runs=1)
    assert main(["plan", "--learn", str(folder), "--machine", str(path)]) == 0
    assert Machine.load(path).learned.runs == 2
    assert path.read_text().count("[learned]") == 1
    assert main(["plan", "--learn", str(folder), "--machine", "frontier"]) == 2
    assert "--learn writes into a machine file, got --machine frontier" in capsys.readouterr().err


def test_a_full_disk_leaves_the_machine_file(tmp_path, monkeypatch, capsys):
    path = written(tmp_path, figures(1), figures(2))
    folder, before = run_folder(tmp_path, "a", Machine.load(path), {"compute": 3.0}, "grid.data=2"), path.read_text()
    monkeypatch.setattr("hpctrain.files.sync", lambda path: os.close(-1))
    assert main(["plan", "--learn", str(folder), "--machine", str(path)]) == 2
    assert path.read_text() == before
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a", "here.toml"]


@pytest.mark.parametrize("command", [["machine"], ["plan", "train.toml", "--machine", "cpu-cluster", "--ranks", "1"]])
def test_where_no_file_can_be_written_nothing_is_measured(tmp_path, monkeypatch, capsys, command):
    monkeypatch.setattr("hpctrain.cli.machine.launcher_path", lambda: None)
    monkeypatch.chdir(Path(__file__).parents[1] / "jobs")
    for name, message in (("", "is a folder; name a file"), ("none/here.toml", "none to write into")):
        assert main([*command, "-o", str(tmp_path / name)]) == 2
        assert message in capsys.readouterr().err


def test_a_stage_is_compared_with_its_own_prediction(tmp_path):
    """Metrics are of the first rank, which has two blocks; the last computes twice as long, with the head as well."""
    machine = Machine.load(written(tmp_path, figures(1), figures(2)))
    job = ["model.width=128", "model.vocabulary=8000", "model.tied=false", "grid.pipeline=2", "train.batch=8"]
    config = load_config(overrides=job)
    sizes, choice = read(config)
    first, last = Estimator(sizes, machine.crowded(2)).stages(choice)
    microbatches = config.train.microbatches

    def computing(stage):
        return microbatches * stage.computing + stage.update

    assert computing(last) > 2 * computing(first)
    time = dict.fromkeys(PARTS, 0.0) | {"compute": computing(first)}
    found = compare(config, machine, [{"seconds": 1.0, "time": time}] * 3)
    assert found["compute"] == pytest.approx((computing(first), computing(first)))
    prediction = predict(config, machine)
    assert found["step"] == (prediction.seconds, 1.0)
    assert prediction.parts["compute"] + prediction.parts["optimizer"] == pytest.approx(computing(last))


def test_a_worker_updates_nothing(tmp_path):
    """Metrics are of the first rank; the last of the data axis serves."""
    machine = Machine.load("cpu-cluster")
    config = load_config(overrides=["grid.data=4", "train.batch=24", "data_parallel.method=parameter_server"])
    sizes, choice = read(config)
    (stage,) = Estimator(sizes, machine).stages(choice)
    found = compare(config, machine, [{"seconds": 1.0, "time": {}}] * 3)
    assert found["compute"][0] == pytest.approx(config.train.microbatches * stage.computing)
    assert predict(config, machine).parts["optimizer"] == stage.update > 0


def test_a_run_whose_last_line_was_cut(tmp_path):
    """By the end of a job, or a full disk, in the middle of a character: it teaches as one without that line."""
    folder = run_folder(tmp_path, "a", Machine.load("cpu-cluster"), {"compute": 3.0})
    whole = read_job(folder)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write('{"job": "é'.encode()[:-1])
    assert read_job(folder) == whole


def test_small_factors_are_written(tmp_path):
    assert "data = 1.235e-06\n" in with_learned("", Learned(data=1.23456e-6, runs=1))


def test_a_run_of_few_steps_teaches_nothing(tmp_path):
    machine = Machine.load("cpu-cluster")
    with pytest.raises(ValueError, match="a run teaches from its step 3 on, got 2 steps"):
        compare(load_config(), machine, [{"seconds": 1.0, "time": {}}] * 2)


def test_what_became_of_a_plan(tmp_path):
    """By part, bytes and memory; and in words, what was not as predicted."""
    machine = Machine.load("cpu-cluster")
    config, records = read_job(run_folder(tmp_path, "a", machine, {"compute": 3.0}, "grid.data=2"))
    predicted = predict(config, machine)
    moved = {axis: 4 * nbytes for axis, nbytes in predicted.bytes.items()}  # of four steps

    def told(memory, device_memory=0, data=0.0):
        each = {"steps": 4, "memory": memory, "device_memory": device_memory}
        ranks = [{**each, "bytes_received": moved | {"data": moved["data"] + data}}] * 2
        return outcome(config, machine, records, ranks)

    found = told(predicted.memory_bytes)
    assert found.seconds["compute"][1] == pytest.approx(3 * found.seconds["compute"][0])
    assert found.bytes == {"data": (predicted.bytes["data"], predicted.bytes["data"])}
    assert found.memory == (predicted.memory_bytes, predicted.memory_bytes)
    (step,) = found.wrong
    assert "most by compute: +" in step
    assert f"the plan was wrong: {step}" in found.text()
    assert json.loads(found.to_json())["wrong"] == found.wrong
    assert len(told(1.2 * predicted.memory_bytes, data=1e6).wrong) == 3
    on_device = told(0, device_memory=1e9)
    assert on_device.memory[1] == 1e9 + machine.device.reserved
    right, _ = learn(machine, {"a": (config, records)})
    assert outcome(config, right, records, []).wrong == []
    assert outcome(config, right, records, []).memory is None


def test_a_run_that_went_on_on_another_grid(tmp_path):
    """Is judged by the steps of its last job, of which ranks.json tells, as config.toml is of that grid."""
    machine = Machine.load("cpu-cluster")
    folder = run_folder(tmp_path, "a", machine, {"compute": 3.0}, "grid.data=2")
    config, job = read_job(folder)
    before = [{**job[0], "seconds": 77.0, "time": dict.fromkeys(PARTS, 77.0)}] * 9
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in [*before, *job]))
    ranks = [{"steps": 5, "memory": 1, "device_memory": 0, "bytes_received": {}}] * 2
    assert read_job(folder)[1] == [*before, *job]  # where the last job was killed before it reported
    (folder / "ranks.json").write_text(json.dumps({"ranks": ranks}))
    assert read_job(folder)[1] == job
    assert outcome(config, machine, [*before, *job], ranks).seconds == compare(config, machine, job)


def test_the_end_of_a_planned_run(tmp_path, capsys):
    """plan.json in its folder, and how the machine file is set right; a run of few steps ends as well."""
    path = written(tmp_path, figures(1), figures(2))
    config, records = read_job(run_folder(tmp_path, "a", Machine.load(path), {"compute": 3.0}, f"run.machine={path}"))
    files = {}
    folder = SimpleNamespace(path=tmp_path / "a", history=records, ranks=[], write=files.__setitem__)
    finishing._tell_outcome(SimpleNamespace(config=config, folder=folder))
    assert json.loads(files["plan.json"])["machine"] == "here"
    assert f"hpctrain plan --learn {tmp_path / 'a'} --machine {path}" in capsys.readouterr().out
    folder.history = records[:2]
    finishing._tell_outcome(SimpleNamespace(config=config, folder=folder))
    assert "a run teaches from its step 3 on, got 2 steps" in capsys.readouterr().out


@pytest.mark.parametrize("left", [None, "nodes = 1\n"])
def test_a_machine_file_that_is_no_more_costs_no_training(tmp_path, caplog, left):
    """Nor one that somebody has edited since."""
    path = written(tmp_path, figures(1), figures(2))
    config, records = read_job(run_folder(tmp_path, "a", Machine.load(path), {"compute": 1.0}, f"run.machine={path}"))
    folder = SimpleNamespace(path=tmp_path / "a", history=records, ranks=[])
    path.unlink() if left is None else path.write_text(left)
    finishing._tell_outcome(SimpleNamespace(config=config, folder=folder))
    assert "WARNING: what the training took is not compared with the plan: " in caplog.text
    assert path.name in caplog.text


def test_only_the_table_of_what_was_learned_is_replaced():
    text = 'node = 1\n[learned]\ndata = 2.0\n[[link]]\nname = "a"\n'
    expected = (
        'node = 1\n[[link]]\nname = "a"\n\n[learned]  # measured over predicted seconds, by `hpctrain plan --learn`\n'
    )
    assert with_learned(text, Learned(tensor=2.0, runs=3)) == expected + "tensor = 2.0\nruns = 3"
