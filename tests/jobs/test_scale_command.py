"""`hpctrain scale` with real ranks."""

import json
import os
import subprocess
import sys

import pytest
from running import ROOT, SMALL, warm

from hpctrain.cli import main
from hpctrain.slurm.allocation import check_allocation

pytestmark = pytest.mark.job


def test_a_study(tmp_path, text):
    """Bytes counted equal the formula; what was measured is used again; a point that fails leaves the others."""
    config = tmp_path / "job.toml"
    config.write_text(f'[data]\ntext = ["{text}"]\n')

    def scale(*options, status=0):
        study = ["--weak", "-o", str(tmp_path / "study")]
        command = warm(["hpctrain", "scale", str(config), *SMALL, "model.vocabulary=258", *study])
        ended = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert ended.returncode == status, ended.stdout + ended.stderr
        return ended.stdout + ended.stderr

    options = ["--steps=2", "--repeat=1", "--ranks=1,2"]
    assert "2 ranks, 1 of 1" in scale(*options)
    results = [json.loads(line) for line in (tmp_path / "study/results.jsonl").read_text().splitlines()]
    assert [result["ranks"] for result in results] == [1, 2]
    for result in results:
        assert result["bytes_received"] == pytest.approx(result["bytes_formula"], rel=1e-12)
        parts = sum(result["seconds"].values())
        assert parts == pytest.approx(result["step_seconds"], rel=0.5)
        assert 0 < result["mfu"] < 1
    assert results[1]["bytes_received"]["data"] > 0
    again = scale(*options)
    assert "1 of 1" not in again
    assert "report.html" in again
    failed = scale("--steps=2", "--repeat=1", "--ranks=1,2,4", f"data.path={tmp_path}/file.txt", status=2)
    assert "failed with status" in failed
    assert [json.loads(line)["ranks"] for line in (tmp_path / "study/results.jsonl").read_text().splitlines()] == [1, 2]


@pytest.fixture
def no_allocation(monkeypatch):
    for name in [name for name in os.environ if name.startswith("SLURM_") and name != "SLURM_CONF"]:
        monkeypatch.delenv(name)


def test_a_study_needs_no_allocation_where_there_is_no_cluster(no_allocation):
    check_allocation(2)


def test_the_login_node_of_a_cluster(slurm, no_allocation, monkeypatch):
    """It is no place for a study, but these tests pass there."""
    around = {name: slurm[name] for name in ("PATH", "SLURM_CONF")}
    name = f"{__file__}::{test_a_study_needs_no_allocation_where_there_is_no_cluster.__name__}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", name]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **around}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    for variable, value in around.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match="no allocation: this node belongs to a Slurm cluster"):
        check_allocation(2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks=1,2"], "a study needs CONFIG.toml, --ranks such as 1,2,4, and --weak or --strong"),
        (["--ranks=1,x", "--weak"], "--ranks must be numbers such as 1,2,4, got '1,x'"),
        (["--ranks=1,2", "--weak", "--repeat=0"], "--repeat must be at least 1, got 0"),
        (["--ranks=1,2", "--weak", "--machine=setup.cfg"], "setup.cfg is not valid TOML"),
        (["--ranks=1,4", "--weak"], "the allocation has 2 tasks, but the study goes to 4 ranks"),
    ],
)
def test_bad_options(options, message, monkeypatch, capsys):
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.chdir(ROOT)
    assert main(["scale", "jobs/scale.toml", *options]) == 2
    assert message in capsys.readouterr().err


def test_one_kind_of_study_at_a_time(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["scale", "jobs/scale.toml", "--ranks=1,2", "--weak", "--strong", "--repeat=0"])
    assert ended.value.code == 2
    assert "--strong: not allowed with argument --weak" in capsys.readouterr().err
