"""`hpctrain report`: the page of a run says what its files say, and what is doubtful; and the picture of losses."""

import csv
import json
import re

import pytest

from hpctrain.cli import main
from hpctrain.report.run import AXES, PARTS, RANK_HEADER
from hpctrain.train.loss_plot import loss_figure, smoothed, window

COORDS = {"replica": 0, "ring": 0, "pipeline": 1, "ulysses": 0, "x": 0, "y": 0, "z": 0}


def record(step, **others):
    return {
        "step": step, "loss": 6.0 - step / 10, "lr": 1e-3, "tokens": 100 * step, "seconds": 0.5,
        "tokens_per_second": 200.0, "time": dict.fromkeys(PARTS, 0.0625), "epochs": {"data.h5": step / 100},
        "bytes_sent": dict.fromkeys(AXES, 8), "bytes_received": dict.fromkeys(AXES, 8), **others,
    }  # fmt: skip


def rank(number, compute=2.0, **others):
    return {
        "rank": number, "host": f"node{number // 4}", "coords": COORDS, "steps": 20,
        "time": {**dict.fromkeys(PARTS, 0.2), "compute": compute}, "memory": 2**28 + number * 2**20, "device_memory": 0,
        "bytes_sent": {"data": 20 * 2**20 * (1 + number)}, "bytes_received": {"data": 40 * 2**20}, **others,
    }  # fmt: skip


@pytest.fixture
def run(tmp_path):
    """write(records, ranks) -> the page of such a run, as `hpctrain report` writes it."""
    about = dict.fromkeys(("grid", "precision", "device", "transport", "mpi", "torch"), "?") | {"model": "GPT-7"}

    def write(records, ranks=()):
        folder = tmp_path / "mine"
        folder.mkdir(exist_ok=True)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records) + '{"st')
        (folder / "config.toml").write_text('[run]\nname = "a < b"\n')
        if ranks:
            (folder / "ranks.json").write_text(json.dumps({**about, "time": 1.79e9, "threads": 1, "ranks": [*ranks]}))
        assert main(["report", str(folder)]) == 0
        return (folder / "report.html").read_text()

    return write


def warnings(text):
    return re.findall(r'<p class="warning">(.*?)</p>', text)


def tables(text):
    """Rows of cells, by table."""
    return [
        [re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row) for row in re.findall(r"<tr.*?</tr>", table)]
        for table in re.findall(r"<table>.*?</table>", text)
    ]


def test_the_page(run, tmp_path, capsys):
    text = run([record(n) for n in range(1, 20)] + [record(20, val_loss=4.5)], [rank(0), rank(1)])
    assert capsys.readouterr().out == f"report: {tmp_path}/mine/report.html\n"
    lead = "20 steps, 2,000 tokens in 10.0 seconds: training loss 5.900 → 4.000, validation loss 4.500 (nats a token); "
    assert f'<p class="lead">{lead}200 tokens/s.</p>' in text
    assert "GPT-7" in text
    assert "2 rank(s) on node0" in text
    assert text.count("data:image/png;base64,") == 6
    assert '<meta name="viewport"' in text
    assert "a &lt; b" in text
    assert warnings(text) == []
    links = re.findall(r'(?:src|href)="(?!data:)(.*?)"', text)  # all else is in it
    assert links == ["metrics.jsonl", "metrics.csv", "ranks.json"]
    assert all((tmp_path / "mine" / name).exists() for name in links)
    traffic, ranks = tables(text)
    assert traffic[1] == ["data", "1.500", "2.000", "2.000", "0.059"]
    assert ranks[0] == list(RANK_HEADER)
    assert ranks[2] == ["1", "node0", "0 0 1 0 0 0 0", "100.00", *["10.00"] * 8, "2.000", "2.000", "257"]


def test_a_plan_beside_its_run(run, tmp_path):
    """By part, with bytes and memory; what was wrong stands out."""
    (tmp_path / "mine").mkdir()
    outcome = {"machine": "frontier", "seconds": {"step": [0.25, 0.5], "compute": [0.2, 0.4], "tensor": [0.0, 0.0]},
            "bytes": {"data": [2**20, 2**21]}, "memory": [2**30, 2**31],
            "wrong": ["a step took 0.5 s, not 0.2 to 0.3"]}  # fmt: skip
    (tmp_path / "mine/plan.json").write_text(json.dumps(outcome))
    text = run([record(n) for n in range(1, 20)])
    assert "Plan for frontier" in text
    assert tables(text)[-1] == [
        ["", "predicted", "measured"], ["step", "0.25 s", "0.5 s"], ["compute", "0.2 s", "0.4 s"],
        ["received on data", "1.000 MiB", "2.000 MiB"], ["memory", "1.00 GiB", "2.00 GiB"],
    ]  # fmt: skip
    assert warnings(text) == ["The plan was wrong: a step took 0.5 s, not 0.2 to 0.3."]


def test_the_metrics_as_a_table(run, tmp_path):
    run([record(1), record(2, val_loss=4.5, loss=None, skipped="spike")])
    with (tmp_path / "mine/metrics.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["step"], first["loss"], first["val_loss"], first["time/bubble"]) == ("1", "5.9", "", "0.0625")
    assert (second["loss"], second["val_loss"], second["epochs/data.h5"]) == ("", "4.5", "0.02")


def test_a_validation_that_was_not_finite(run):
    """Its loss is null, as JSON has no NaN; the picture has the others."""
    records = [record(1, val_loss=4.0), record(2, val_loss=None)]
    assert "validation loss not finite (nats a token); " in run(records)
    (validation,) = (line for line in loss_figure(records, "").axes[0].lines if line.get_label() == "validation")
    assert validation.get_xydata().tolist() == [[1, 4.0]]


def test_a_job_that_was_killed(run):
    """Its ranks have not said what they did."""
    text = run([record(1)])
    assert "the times and bytes below are those of rank 0" in text
    assert text.count("data:image/png;base64,") == 3
    assert warnings(text) == ["The speed is that of 1 step(s) only."]


def test_the_speed_is_of_the_last_job(run):
    """Which may have had another grid; ranks.json counts its steps. All count where it took none."""
    records = [record(n, tokens_per_second=100.0 if n <= 30 else 400.0) for n in range(1, 51)]
    text = run(records, [rank(0), rank(1)])
    assert "; 400 tokens/s." in text
    assert warnings(text) == []
    assert "; 100 tokens/s." in run(records, [rank(0, steps=0), rank(1, steps=0)])


def test_what_is_doubtful_is_said(run):
    speeds = [100.0, 100.0, 200.0, 300.0, 300.0] * 8
    records = [record(n + 1, tokens_per_second=speed) for n, speed in enumerate(speeds)]
    records[7] |= {"loss": None, "skipped": "spike"}
    records[9]["checkpoint_seconds"] = 6.0
    text = run(records, [rank(0), rank(1), rank(2, compute=5.0)])
    assert warnings(text) == [
        "1 step(s) were left out, the first is 8: see skipped in metrics.jsonl.",
        "The speed is doubtful: half of the steps lie outside of 100 to 300 tokens/s; others may have used the cores.",
        "Training waited 6.0 seconds for checkpoints, 30 % of its time.",
        "Rank 2 (node0) computed for 2.5 times as long as the median rank.",
    ]


def test_of_many_ranks_the_first_and_the_last_are_shown(run):
    text = run([record(n) for n in range(1, 20)], [rank(n) for n in range(100)])
    (_, ranks) = tables(text)
    assert [row[0] for row in ranks[1:]] == [str(n) for n in [*range(20), *range(80, 100)]]
    assert "60 ranks in between are in ranks.json" in text


def test_no_run(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert f"{tmp_path}/metrics.jsonl has no step yet" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["ranks.json", "plan.json"])
def test_a_damaged_file_is_named(run, tmp_path, capsys, name):
    run([record(1)])
    (tmp_path / "mine" / name).write_text("{")
    assert main(["report", str(tmp_path / "mine")]) == 2
    assert f"{name} is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("line", ['{"step": 3}', "3"])
def test_a_line_that_is_no_step_is_named(run, tmp_path, capsys, line):
    run([record(1)])
    with (tmp_path / "mine" / "metrics.jsonl").open("w") as file:
        file.write(line + "\n")
    assert main(["report", str(tmp_path / "mine")]) == 2
    assert f"metrics.jsonl is damaged: {line} is not the line of a step" in capsys.readouterr().err


def test_the_picture_of_the_losses():
    """Its title is the run's name; raw and smoothed losses, validation and learning rate are in it."""
    records = [record(n, val_loss=4.0) if n % 10 == 0 else record(n) for n in range(1, 61)]
    records[4]["loss"] = None
    figure = loss_figure(records, "mine")
    axes, rates = figure.axes
    assert axes.get_title() == "mine"
    raw, mean, validation = axes.lines
    assert [line.get_label() for line in axes.lines] == ["training", "training, mean of 7 steps", "validation"]
    assert raw.get_xdata().tolist() == mean.get_xdata().tolist() == [n for n in range(1, 61) if n != 5]
    assert validation.get_xdata().tolist() == [10, 20, 30, 40, 50, 60]
    assert rates.lines[0].get_ydata().tolist() == [1e-3] * 60
    assert rates.get_ylabel() == "learning rate"


def test_losses_are_smoothed_by_their_neighbours():
    losses = [float(n % 7) for n in range(100)]
    assert window(100) == 9
    assert smoothed(losses)[50] == pytest.approx(sum(losses[46:55]) / 9)
    assert (smoothed(losses)[0], smoothed(losses)[-1]) == (losses[0], losses[-1])
    assert smoothed([float(n) for n in range(100)]) == pytest.approx(list(range(100)))  # no shift
