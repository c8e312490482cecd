"""Scaling studies: how points grow, what is computed from the measurements, and what a report says."""

import csv
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain import plan
from hpctrain.cli import main
from hpctrain.config import load_config
from hpctrain.grid_shape import grid_shape
from hpctrain.scale import figures, report, work
from hpctrain.scale.figures import PARTS
from hpctrain.scale.points import points
from hpctrain.scale.results import Results
from hpctrain.scale.runner import key, surroundings
from hpctrain.scale.summary import summarise

BASE = ["model.layers=2", "model.width=64", "model.heads=4", "train.batch=6", "train.microbatches=2"]


@pytest.mark.parametrize(
    ("mode", "vary", "expected"),  # (ranks, data, pipeline, box, batch, layers, width) of each point
    [
        ("weak", "data", [(1, 1, 1, 1, 6, 2, 64), (2, 2, 1, 1, 12, 2, 64), (6, 6, 1, 1, 36, 2, 64)]),
        ("weak", "pipeline", [(1, 1, 1, 1, 6, 2, 64), (2, 1, 2, 1, 6, 4, 64), (6, 1, 6, 1, 6, 12, 64)]),
        ("weak", "tensor", [(1, 1, 1, 1, 6, 2, 64), (2, 1, 1, 2, 6, 2, 96), (6, 1, 1, 6, 6, 2, 160)]),
        ("strong", "data", [(1, 1, 1, 1, 6, 2, 64), (2, 2, 1, 1, 6, 2, 64), (6, 6, 1, 1, 6, 2, 64)]),
        ("strong", "tensor", [(1, 1, 1, 1, 6, 2, 64), (2, 1, 1, 2, 6, 2, 64), (6, 1, 1, 6, 6, 2, 64)]),
    ],
)
def test_how_points_grow(config, mode, vary, expected):
    found = []
    for point in points(config, BASE, [1, 2, 6], mode, vary):
        g, c = point.config.grid_shape, point.config
        box = g["x"] * g["y"] * g["z"]
        found.append((point.ranks, g["replica"], g["pipeline"], box, c.train.batch, c.model.layers, c.model.width))
        assert load_config(config, point.overrides) == c
    assert found == expected


@pytest.mark.parametrize("vary", ["data", "pipeline", "tensor"])
def test_weak_points_keep_the_work_of_a_rank(config, vary):
    """The width is rounded, so that tensor's are near."""
    base = ["model.layers=4", "model.width=1024", "model.heads=8", "model.context=64", "model.vocabulary=64"]
    shares = [work.flops(point.config) / point.ranks for point in points(config, base, [1, 2, 4, 8], "weak", vary)]
    assert shares == pytest.approx([shares[0]] * 4, rel=0.03)


def test_auto_weighs_bytes_against_the_bubble(config):
    """Where messages are slow, stages, which exchange the least; where they are fast, none, as stages are idle."""
    base = [*BASE, "train.batch=2", "model.context=8", "model.tied=false"]
    for bandwidth, stages in ((1e-4, 2), (1e4, 1)):
        machine = plan.Machine.load("cpu-cluster")
        machine = replace(machine, device=replace(machine.device, launch=0.0))
        machine = replace(machine, link=(replace(machine.link[0], latency=0.0, bandwidth=bandwidth * 2**30),))
        point = points(config, base, [1, 2], "strong", "auto", machine)[1]
        assert point.config.grid_shape["pipeline"] == stages


def test_flops_are_those_that_torch_counts():
    """In the products that the model is made of, attention's own included."""
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    config = load_config(overrides=[*BASE, "model.context=8"])
    m = config.model
    rows = config.train.batch * m.context
    layers = [(m.width, 3 * m.width), (m.width, m.width), (m.width, 4 * m.width), (4 * m.width, m.width)] * m.layers
    with FlopCounterMode(display=False) as counter:
        for n_in, n_out in [*layers, (m.width, m.vocabulary)]:
            torch.nn.Linear(n_in, n_out)(torch.ones(rows, n_in, requires_grad=True)).sum().backward()
        for _ in range(m.layers):
            q = torch.ones(config.train.batch * m.heads, m.context, m.width // m.heads, requires_grad=True)
            (q @ q.transpose(1, 2) @ q).sum().backward()
    assert work.flops(config) == counter.get_total_flops()


def test_the_bound_is_that_of_each_product_forward_and_backward():
    """By Al Daas et al. (2022), theorem 6.1: on a cube of ranks a product of a × b × c needs at least
    3 (abc/P)^(2/3) - (ab + ac + bc)/P elements, and its two gradients are products of the same sizes."""
    sizes = ["model.width=64", "model.heads=4", "model.layers=3", "model.context=32", "model.vocabulary=64"]
    box = ["grid.tensor=[2, 2, 2]", "train.batch=2", "train.microbatches=1", "precision.compute=fp64"]
    config = load_config(overrides=[*BASE, *sizes, *box])
    rows, width, ranks = 2 * 32, 64, 8

    def least(n):
        a, b, c = rows, width, n
        return 3 * (a * b * c / ranks) ** (2 / 3) - (a * b + a * c + b * c) / ranks

    elements = 3 * (least(192) + least(64) + least(256) + least(256)) + least(64)
    # what arrives forward is kept, so that backward moves the gradients of input, weight and output only
    assert work.bound(config, 0)["tensor"] == pytest.approx(8 * 2 * elements, rel=1e-12)


def test_blocks_that_are_computed_once_more_are_received_once_more():
    """A block gathers the input of two products, and scatters the output of two: half of each arrives."""
    cut = [*BASE, "grid.tensor=[2, 1, 1]", "model.context=32"]
    kept, again = (load_config(overrides=[*cut, f"train.recompute={how}"]) for how in ("none", "block"))
    assert work.has_formula(again)
    microbatches, layers, rows = 2, 2, 3 * 32
    more = work.received(again, 0)["tensor"] - work.received(kept, 0)["tensor"]
    assert more == microbatches * layers * 4 * 4 * rows * 64 / 2


@pytest.mark.parametrize(
    ("ranks", "vary", "overrides", "message"),
    [
        ([2, 3], "data", ["grid.data=2"], "--ranks 3 cannot be factored: it is not a multiple of the first point's 2"),
        ([2, 4], "data", [], "the grid of .* has 1 ranks, but the study begins with 2; give the grid"),
        ([2, 1], "data", [], "--ranks must be rising positive numbers, such as 1,2,4, got 2,1"),
        ([1, 2], "depth", [], "--vary must be one of data, pipeline, tensor, auto, got 'depth'"),
        ([1, 2], "auto", [], "--vary auto chooses by measured figures; give --machine FILE"),
        ([1, 8], "pipeline", [], "8 ranks by --vary pipeline: .*pipeline"),
    ],
)
def test_bad_studies_are_refused(config, ranks, vary, overrides, message):
    with pytest.raises(ValueError, match=message):
        points(config, [*BASE, *overrides], ranks, "strong", vary)


def measurement(ranks, seconds, repeat=0, crowded=False, **others):
    return {
        "key": f"k{ranks}", "ranks": ranks, "repeat": repeat,
        "grid": grid_shape(ranks, 1, 1),
        "step_seconds": seconds, "tokens_per_second": 100 * ranks / seconds, "flops": 4e9 * ranks, "mfu": 0.5,
        "peak_flops_per_second": 1e10, "memory": 2**28, "oversubscribed": crowded, "hosts": ["h"], "mpi": "M",
        "time": 1.79e9, "processor": "P", "threads": 1,
        "bytes_received": {"data": 2**20}, "bytes_formula": {"data": 2**20},
        "bytes_bound": {"data": 2**19}, "steps": 3,
        "seconds": dict.fromkeys(PARTS, 0.1),
        "mode": "weak", "vary": "data", "commit": "c", "modules": [], "config": "[run]\n", **others,
    }  # fmt: skip


@pytest.fixture
def study(tmp_path):
    folder = tmp_path / "mine"
    results = Results(folder)
    for repeat, (one, two) in enumerate([(1.0, 1.25), (2.0, 2.0), (1.0, 1.0)]):
        results.add(measurement(1, one, repeat))
        results.add(measurement(2, two, repeat))
        results.add(measurement(4, 5.0, repeat, crowded=True))
    return folder


def test_efficiency_is_of_medians(study):
    one, two, four = summarise(study).rows
    assert one.median_flops_per_second == 4e9
    assert two.median_flops_per_second == 8e9 / 1.25
    assert two.efficiency == [0.8, 0.5, 1.0]
    assert two.median_efficiency == 0.8
    assert four.oversubscribed


def test_a_report_is_of_one_study(tmp_path):
    """Of those in a folder the one that was asked for; without asking, that of the newest measurement."""
    results = Results(tmp_path)
    data, pipeline = ({"mode": "weak", "vary": v, "study": [[1, "k1"], [2, f"{v}2"]]} for v in ("data", "pipeline"))
    data["study"].append([4, "data4"])
    for ranks, name in data["study"]:
        results.add(measurement(ranks, 1.0, **{**data, "key": name}))
    results.add(measurement(2, 2.0, **{**pipeline, "key": "pipeline2"}))  # one rank is the same for both
    for asked, vary, efficient in [(data, "data", [1, 1, 1]), (pipeline, "pipeline", [1, 0.5])]:
        study = summarise(tmp_path, asked)
        assert (study.vary, [row.median_efficiency for row in study.rows]) == (vary, efficient)
    assert summarise(tmp_path) == study
    missing = {**pipeline, "study": [[1, "other"], [2, "pipeline2"]]}
    assert (
        "The point of 1 rank(s), which efficiency should be over, is not" in report.write(tmp_path, missing).read_text()
    )


def test_measurements_of_several_machines(tmp_path):
    """Are not passed off as the newest one's."""
    for ranks, commit in ((1, "old"), (2, "new")):
        Results(tmp_path).add(measurement(ranks, 1.0, commit=commit, key=f"{ranks}"))
    said = report.where(summarise(tmp_path))
    assert "commit new;" in said
    assert said.endswith("This is the newest measurement: in commit others differ.")


def test_measurements_without_a_study_are_told_apart_by_their_kind(tmp_path):
    for ranks, vary, steps in [(1, "data", 3), (2, "data", 3), (4, "data", 3), (1, "data", 5), (2, "data", 5)]:
        Results(tmp_path).add(measurement(ranks, 1.0, vary=vary, steps=steps, key=f"{ranks} {steps}"))
    study = summarise(tmp_path)
    assert [row.ranks for row in study.rows] == [1, 2]
    assert study.about["steps"] == 5


def test_the_report_read_back(study):
    text = report.write(study).read_text()
    lines = re.findall(r"<tr(?: class=\"faint\")?>(<td>.*?)</tr>", text)
    rows = [re.findall(r"<td(?: class=\"left\")?>(.*?)</td>", line) for line in lines]
    assert [row[report.HEADER.index("efficiency")] for row in rows] == ["1.000", "0.800", "oversubscribed"]
    assert [row[report.HEADER.index("lower bound")] for row in rows] == ["0.500"] * 3
    assert text.count("data:image/png;base64,") == 6
    links = re.findall(r"(?:src|href)=\"(?!data:)(.*?)\"", text)  # all else is in it
    assert links == ["report.csv", "report.json", "report.md"]
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text
    assert '<p class="lead">100 tokens/s on 1 rank(s), 160 on 2: efficiency 0.800 (0.500 to 1.000)' in text
    assert "; 4 ranks have more ranks than cores, and say nothing of scaling." in text
    assert 'class="warning"' not in text
    assert "they show that it works, not how it scales" in text
    lines = (study / "report.md").read_text().splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    assert tuple(table[0]) == report.HEADER
    assert table[1:] == rows
    assert sorted(path.stem for path in study.glob("*.png")) == [
        "bytes",
        "efficiency",
        "memory",
        "mfu",
        "throughput",
        "time",
    ]


def test_the_same_as_numbers(study):
    report.write(study)
    lines = json.loads((study / "report.json").read_text())
    assert [(line["ranks"], line["efficiency"], line["repeats"]) for line in lines] == [
        (1, 1, 3),
        (2, 0.8, 3),
        (4, None, 3),
    ]
    assert [line["step_seconds"] for line in lines] == [1.0, 1.25, 5.0]
    with (study / "report.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [{key: "" if value is None else str(value) for key, value in line.items()} for line in lines] == rows


def test_what_makes_figures_doubtful(tmp_path):
    for ranks, lacking in ((1, 0.05), (2, 0.6), (4, 0.3)):
        Results(tmp_path).add(measurement(ranks, 1.0, cores_lacking=lacking))
    found = re.findall(r'<p class="warning">(.*?)</p>', report.write(tmp_path).read_text())
    assert found == [
        "1 repeat(s) of a point: what differs by chance cannot be told from what scales (--repeat 3).",
        "Others used the cores meanwhile, up to 0.6 of those that 2 rank(s) needed: the points of 2, 4 ranks are "
        "slower than they should be.",
    ]


def test_more_studies_than_colours(tmp_path, monkeypatch):
    """Are all drawn."""
    monkeypatch.setattr(figures, "_png", lambda figure, axes: axes.get_legend_handles_labels()[1])
    for number in range(6):
        Results(tmp_path / f"study{number}").add(measurement(1, 0.5))
    studies = [summarise(tmp_path / f"study{number}") for number in range(6)]
    for draw in (figures.throughput, figures.efficiency):
        assert {f"study{number} (data)" for number in range(6)} <= {*draw(studies)}


def test_a_study_in_this_folder_has_its_name(study, monkeypatch):
    monkeypatch.chdir(study)
    assert summarise(Path()).name == "mine"


def test_studies_over_each_other(study, tmp_path):
    Results(tmp_path / "other").add(measurement(1, 0.5))
    text = report.compare([study, tmp_path / "other"], tmp_path / "both").read_text()
    assert "mine and other" in text
    assert text.count("<table>") == 2
    Results(tmp_path / "strong").add(measurement(1, 0.5, mode="strong"))
    with pytest.raises(ValueError, match="mine is weak, strong is strong"):
        report.compare([study, tmp_path / "strong"], tmp_path / "both")
    with pytest.raises(ValueError, match="holds no measurements"):
        summarise(tmp_path / "nowhere")


def test_a_full_disk_leaves_what_was_there(study):
    """The line that does not fit is torn; the next one is whole again."""
    before = Results(study).read()
    program = """
import json, resource, signal, sys
from pathlib import Path
from hpctrain.scale.results import Results
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
folder = Path(sys.argv[1])
limit = (folder / "results.jsonl").stat().st_size + 50
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
Results(folder).add(json.loads(sys.argv[2]))
"""
    more = measurement(8, 1.0)
    full = subprocess.run([sys.executable, "-c", program, str(study), json.dumps(more)], capture_output=True, text=True)
    assert "OSError" in full.stderr
    assert Results(study).read() == before
    Results(study).add(more)
    assert Results(study).read() == [*before, more]


def test_where_there_is_no_git(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert surroundings()["commit"] == "unknown"


def test_what_is_measured_has_a_name(config):
    one, two = points(config, BASE, [1, 2], "weak", "data")
    assert key(one, 5, 1) == key(points(config, BASE, [1, 4], "weak", "tensor")[0], 5, 1)
    assert len({key(one, 5, 1), key(two, 5, 1), key(one, 6, 1), key(one, 5, 2)}) == 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"gflops = [", "machine.toml is not valid TOML: "),
        (b"# " + b"x" * 2**20, "machine.toml is longer than the 1048576 bytes"),
        (b"[" * 100_000, "machine.toml is not valid TOML: "),
    ],
)
def test_bad_figures_of_a_machine(tmp_path, capsys, content, message):
    machine = tmp_path / "machine.toml"
    machine.write_bytes(content)
    assert main(["scale", "jobs/scale.toml", "--ranks=1", "--weak", f"--machine={machine}"]) == 2
    assert message in capsys.readouterr().err
