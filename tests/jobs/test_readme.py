"""The README tells the truth: its commands and its program run as they stand."""

import json
import os
import re
import subprocess

import pytest
from checkout import copy
from running import ROOT

pytestmark = pytest.mark.job

RUNS = ("server", "local")  # of "Spread the batch"
README = (ROOT / "README.md").read_text(encoding="utf-8")


def section(title):
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


@pytest.fixture
def checkout(tmp_path):
    """A copy of the checkout."""
    return copy(tmp_path / "copy")


def test_the_two_commands_are_those_of_ci():
    """They take too long for a test: CI runs both."""
    commands = re.findall(r"^    (bash jobs/\S+)", README.split("\n## ")[0], re.MULTILINE)
    assert commands == ["bash jobs/train.sbatch", "bash jobs/test.sbatch"]
    ci = (ROOT / ".ci/run").read_text()
    assert all(command in ci for command in commands)


@pytest.mark.parametrize(
    "title", ["Submit jobs", "Stop and go on", "Study scaling", "Pipelines", "Spread the batch", "Memory and precision"]
)
def test_commands(checkout, title):
    """The first indented block of the section, run as a script; that about checkpoints has its data from another."""
    block = re.search(r"(?:^    .*\n)+", section(title), re.MULTILINE).group()
    data = "hpctrain pack hpctrain -o data.h5\n" if title == "Stop and go on" else ""
    script = "set -euo pipefail\nsource jobs/env.sh\n" + data + block
    ended = subprocess.run(
        ["bash", "-c", script], cwd=checkout, capture_output=True, text=True, timeout=240, env={**os.environ}
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    if title == "Submit jobs":
        assert (checkout / "gpt2-mine/model.safetensors").exists()
        for name in re.findall(r"^    runs/NAME/([\w.]+)", section(title), re.MULTILINE):
            assert (checkout / "runs/mine" / name).exists()
    elif title == "Stop and go on":
        assert (checkout / "gpt2-step-3/model.safetensors").exists()
        assert len((checkout / "runs/kept/metrics.jsonl").read_text().splitlines()) == 8
        assert "resumed after step 6" in ended.stdout
    elif title == "Spread the batch":
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
    else:
        assert (checkout / "runs/scale-weak/report.html").read_text().count("data:image/png") == 5


def test_the_program(start, tmp_path, python):
    """On four ranks; the losses go down."""
    (program,) = re.findall(r"```python\n(.*?)```", section("Use the layers in research code"), re.DOTALL)
    (tmp_path / "program.py").write_text(program)
    ended = start(4, python, "-m", "mpi4py", str(tmp_path / "program.py")).wait(90)
    assert ended.status == 0, ended.output
    losses = [float(loss) for loss in re.findall(r"step \d: loss ([\d.]+)", ended.output)]
    assert len(losses) == 3
    assert losses[0] > losses[1] > losses[2]


def test_the_files_exist():
    for name in re.findall(
        r"`(hpctrain/[\w/]+\.py|tests/[\w/]+\.py|train/\w+\.py)`", section("Read these files first")
    ):
        assert (ROOT / name).exists() or (ROOT / "hpctrain" / name).exists(), name
