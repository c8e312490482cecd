"""`hpctrain doctor` on this machine, and on machines that lack something."""

import json
import subprocess

import h5py
import pytest
from running import warm

from hpctrain.cli import main
from hpctrain.doctor import findings

pytestmark = pytest.mark.job


def test_here():
    """Training works here, as the other tests show; every thing is looked at."""
    done = subprocess.run(warm(["hpctrain", "doctor", "--json"]), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    found = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert set(found) >= {"Python", "launcher", "MPI", "threads in MPI", "GPU", "HDF5", "Slurm", "modules", "site"}
    assert ("with MPI" in found["HDF5"]["found"]) == h5py.get_config().mpi
    assert not [finding for finding in found.values() if finding["level"] == "error"]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"MPIRUN": "/nowhere/mpirun"}, "No such file"),
        ({"HPCTRAIN_LAUNCHER": "false"}, "ends with status 1: no message"),
        ({"HPCTRAIN_LAUNCHER": "false", "HPCTRAIN_SITE": "moon"}, "known are frontier, generic"),
    ],
)
def test_what_would_make_training_fail(settings, text, monkeypatch, capsys):
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if text in line]
    assert line.startswith("error")
    assert lines[lines.index(line) + 1].strip().startswith("->")


DIRECT = "given to MPI directly (MPIX_Query_cuda_support() = 1)"
STAGED = "staged through pinned host memory (no sign of CUDA support in this MPI)"


@pytest.mark.parametrize(
    ("facts", "levels"),
    [
        ({"devices": 0}, {"GPU": "ok"}),
        (
            {"devices": 4, "transport": DIRECT, "cupy": "14"},
            {"GPU": "ok", "CUDA awareness": "ok", "CuPy": "ok"},
        ),
        (
            {"devices": 4, "transport": DIRECT, "cupy": None},
            {"GPU": "ok", "CUDA awareness": "ok"},
        ),
        (
            {"devices": 4, "transport": STAGED, "cupy": "14"},
            {"GPU": "ok", "CUDA awareness": "note", "CuPy": "ok"},
        ),
        (
            {"devices": 1, "transport": STAGED, "cupy": None},
            {"GPU": "ok", "CUDA awareness": "note", "CuPy": "note"},
        ),
    ],
)
def test_devices(facts, levels):
    assert {finding.name: finding.level for finding in findings.gpu(facts)} == levels


def test_a_site_that_is_empty(monkeypatch):
    """As in jobs/env.sh."""
    monkeypatch.setenv("HPCTRAIN_SITE", "")
    assert findings.site() == findings.Finding("site", "ok", "generic")
