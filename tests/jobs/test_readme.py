"""The READMEs tell the truth: their commands and programs run as they stand."""

import json
import os
import re
import subprocess

import pytest
from checkout import copy
from running import ROOT

pytestmark = pytest.mark.job

RUNS = ("server", "local")  # of hpctrain/data_parallel
README = (ROOT / "README.md").read_text(encoding="utf-8")


def section(name, title):
    """What stands under a title of a file, whatever its rank."""
    after = re.split(rf"^#+ {title}\n", (ROOT / name).read_text(encoding="utf-8"), maxsplit=1, flags=re.MULTILINE)[1]
    return re.split(r"^#+ ", after, maxsplit=1, flags=re.MULTILINE)[0]


@pytest.fixture
def checkout(tmp_path):
    """A copy of the checkout, whose jobs train a smaller model."""
    folder = copy(tmp_path / "copy", warm=True)
    for job in ("train", "scale"):
        text = (folder / f"jobs/{job}.toml").read_text()
        small = re.sub(r"^width = \d+", "width = 32", text, flags=re.MULTILINE)
        assert small != text
        (folder / f"jobs/{job}.toml").write_text(re.sub(r"^sample = \d+", "sample = 9", small, flags=re.MULTILINE))
    return folder


def test_the_two_commands_are_those_of_ci():
    """They take too long for a test: CI runs both."""
    commands = re.findall(r"^    (bash jobs/\S+)", README.split("\n## ")[0], re.MULTILINE)
    assert commands == ["bash jobs/train.sbatch", "bash jobs/test.sbatch"]
    ci = (ROOT / ".ci/run").read_text()
    assert all(command in ci for command in commands)


def test_the_readme_is_short():
    assert len(README.encode()) <= 12_000


COMMANDS = {
    "Submit jobs": "README.md",
    "Study scaling": "README.md",
    "Data": "jobs/README.md",
    "Stop and go on": "hpctrain/checkpoint/README.md",
    "Pipelines": "hpctrain/pipeline/README.md",
    "Share long sequences": "hpctrain/layers/README.md",
    "Message driven pipelines": "hpctrain/pipeline/README.md",
    "Data parallelism": "hpctrain/data_parallel/README.md",
    "Memory and precision": "hpctrain/data_parallel/README.md",
    "Models": "hpctrain/models/README.md",
    "Experts": "hpctrain/models/README.md",
    "Plan": "hpctrain/plan/README.md",
    "Your own": "hpctrain/models/README.md",
}
SLOW = {"Plan", "Experts", "Pipelines", "Share long sequences"}


# Read by every Python before all else: `hpctrain machine` measures each figure twice rather than nine times, in two
# rounds, and trains smaller models.
SOONER = """
import sys
if "hpctrain.plan.measure" in sys.orig_argv:
    from hpctrain.plan import computing
    assert computing.CALLS == 9
    computing.CALLS = 2
elif "machine" in sys.orig_argv:
    from hpctrain.cli import machine
    from hpctrain.plan import in_training
    assert machine.ROUNDS == 5
    machine.ROUNDS = 2
    shrink = lambda setting: setting.replace("=256", "=64").replace("=640", "=160")
    in_training.JOBS = [(batch, count, *map(shrink, model)) for batch, count, *model in in_training.JOBS]
"""


@pytest.mark.parametrize(
    "title", [pytest.param(title, marks=pytest.mark.slow) if title in SLOW else title for title in COMMANDS]
)
def test_commands(checkout, title):
    """The first indented block of the section, run as a script, beside the program that stands there."""
    fence = r"```python\n(.*?)```\n"
    text = section(COMMANDS[title], title)
    block = re.search(r"(?:^    .*\n)+", re.sub(fence, "", text, flags=re.DOTALL), re.MULTILINE).group()
    for program in re.findall(fence, text, re.DOTALL) if title == "Your own" else ():
        (checkout / "mine.py").write_text(program)
    script = "set -euo pipefail\nsource jobs/env.sh\n" + block
    (checkout / "sooner").mkdir()
    (checkout / "sooner/sitecustomize.py").write_text(SOONER)
    environment = {**os.environ, "PYTHONPATH": str(checkout / "sooner")} if title == "Plan" else {**os.environ}
    ended = subprocess.run(
        ["bash", "-c", script], cwd=checkout, capture_output=True, text=True, timeout=240, env=environment
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    if title == "Submit jobs":
        assert (checkout / "gpt2-mine/model.safetensors").exists()
        assert len((checkout / "runs/mine/metrics.jsonl").read_text().splitlines()) == 12
        for name in re.findall(r"^    runs/NAME/([\w.]+)", (ROOT / "jobs/README.md").read_text(), re.MULTILINE):
            assert (checkout / "runs/mine" / name).exists()
    elif title == "Data":
        last = json.loads((checkout / "runs/mixed/metrics.jsonl").read_text().splitlines()[-1])
        assert {*last["epochs"]} == {"text.h5", "sums.h5"}
        assert '"step 4"' in (checkout / "runs/mixed/trace.json").read_text()
        assert (checkout / "runs/mixed/report.html").exists()
    elif title == "Stop and go on":
        assert (checkout / "gpt2-step-3/model.safetensors").exists()
        assert len((checkout / "runs/kept/metrics.jsonl").read_text().splitlines()) == 8
        assert "resumed after step 6" in ended.stdout
    elif title == "Data parallelism":
        last = [json.loads((checkout / f"runs/{name}/metrics.jsonl").read_text().splitlines()[-1]) for name in RUNS]
        assert [record["step"] for record in last] == [6, 6]
        assert 0 < sum(last[0]["staleness"]) <= 12 == 2 * last[0]["step"]
        assert last[1]["bytes_sent"]["data"] > 1000  # the sixth step ends in an average
    elif title == "Memory and precision":
        records = (checkout / "runs/frugal/metrics.jsonl").read_text().splitlines()
        assert [json.loads(record)["step"] for record in records] == [1, 2, 3, 4]
    elif title == "Pipelines":
        zbv, slices = (
            [json.loads(line)["loss"] for line in (checkout / f"runs/{name}/metrics.jsonl").read_text().splitlines()]
            for name in ("zbv", "slices")
        )
        assert zbv == pytest.approx(slices, rel=1e-5)
        assert len((checkout / "runs/boxes/metrics.jsonl").read_text().splitlines()) == 2
    elif title == "Share long sequences":
        both, chosen, documents = (
            [json.loads(line)["loss"] for line in (checkout / f"runs/{name}/metrics.jsonl").read_text().splitlines()]
            for name in ("both", "chosen", "documents")
        )
        assert both == pytest.approx(chosen, rel=1e-5)
        assert len(documents) == 4
        assert (checkout / "attention.png").read_bytes().startswith(b"\x89PNG")
    elif title == "Message driven pipelines":
        records = [json.loads(line) for line in (checkout / "runs/ampnet/metrics.jsonl").read_text().splitlines()]
        assert [sum(record["nodes"]["stage 0"]["staleness"]) for record in records] == [4, 8]
        again = [json.loads(line) for line in (checkout / "runs/again/metrics.jsonl").read_text().splitlines()]
        assert [record["loss"] for record in again] == [record["loss"] for record in records]
    elif title == "Models":
        assert json.loads((checkout / "llama-small/config.json").read_text())["num_key_value_heads"] == 2
        assert "resumed after step 4" in ended.stdout
    elif title == "Experts":
        assert json.loads((checkout / "mixtral-small/config.json").read_text())["model_type"] == "mixtral"
        assert "resumed after step 4" in ended.stdout
        last = json.loads((checkout / "runs/experts/metrics.jsonl").read_text().splitlines()[-1])
        assert last["step"] == 6
        assert {"load", "imbalance", "entropy", "dropped"} <= {*last["experts"]}
    elif title == "Plan":
        assert "predicted s  measured s" in ended.stdout
        assert "learned from 1 runs" in ended.stdout
        assert "[learned]" in (checkout / "here.toml").read_text()
    elif title == "Your own":
        records = (checkout / "runs/mine/metrics.jsonl").read_text().splitlines()
        assert [json.loads(record)["step"] for record in records] == [1, 2, 3]
    else:
        assert (checkout / "runs/scale-weak/report.html").read_text().count("data:image/png") == 6


@pytest.fixture
def output_of_program(start, tmp_path, python):
    """output_of_program(title): of the program in that section of layers/README.md, on four ranks."""

    def run(title):
        (program,) = re.findall(r"```python\n(.*?)```", section("hpctrain/layers/README.md", title), re.DOTALL)
        (tmp_path / "program.py").write_text(program)
        ended = start(4, python, "-m", "mpi4py", str(tmp_path / "program.py")).wait(90)
        assert ended.status == 0, ended.output
        return ended.output

    return run


def test_the_program(output_of_program):
    """On four ranks; the losses go down."""
    output = output_of_program("Use the layers in research code")
    losses = [float(loss) for loss in re.findall(r"step \d: loss ([\d.]+)", output)]
    assert len(losses) == 3
    assert losses[0] > losses[1] > losses[2]


def test_the_program_of_attention(output_of_program):
    """On four ranks, each of which finds what one rank computes."""
    output = output_of_program("Attention of sequences that are cut")
    differ = [float(each) for each in re.findall(r"differs by (\S+)", output)]
    assert len(differ) == 4
    assert max(differ) < 1e-5


def test_the_program_of_experts(output_of_program):
    output = output_of_program("Mixtures of experts")
    found = re.findall(r"has (\d) experts: differs by (\S+)", output)
    assert sorted(int(experts) for experts, _ in found) == [1, 1, 2, 2]
    assert max(float(each) for _, each in found) < 1e-12


def test_the_files_exist():
    for name in re.findall(
        r"`(hpctrain/[\w/]+\.py|tests/[\w/]+\.py|train/\w+\.py)`", section("README.md", "Read these files first")
    ):
        assert (ROOT / name).exists() or (ROOT / "hpctrain" / name).exists(), name
