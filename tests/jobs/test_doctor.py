"""`hpctrain doctor` on this machine, and on machines that lack something."""

import json
import os
import shutil
import subprocess

import h5py
import pytest

from hpctrain.doctor import findings

pytestmark = pytest.mark.job


def doctor(**environment):
    command = [shutil.which("hpctrain"), "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **environment})
    return done.returncode, {finding["name"]: finding for finding in json.loads(done.stdout)}


def test_here():
    """Training works here, as the other tests show; every thing is looked at."""
    status, found = doctor()
    assert status == 0
    assert set(found) >= {"Python", "launcher", "MPI", "threads in MPI", "GPU", "HDF5", "Slurm", "modules", "site"}
    assert ("with MPI" in found["HDF5"]["found"]) == h5py.get_config().mpi
    assert not [finding for finding in found.values() if finding["level"] == "error"]


@pytest.mark.parametrize(
    ("setting", "value", "name", "text"),
    [
        ("MPIRUN", "/nowhere/mpirun", "launcher", "No such file"),
        ("HPCTRAIN_LAUNCHER", "false", "launcher", "ends with status 1"),
        ("HPCTRAIN_SITE", "moon", "site", "known are frontier, generic"),
    ],
)
def test_what_would_make_training_fail(setting, value, name, text):
    status, found = doctor(**{setting: value})
    assert status == 1
    assert found[name]["level"] == "error"
    assert text in found[name]["found"]
    assert found[name]["advice"]


DIRECT = "given to MPI directly (MPIX_Query_cuda_support() = 1)"
STAGED = "staged through pinned host memory (no sign of CUDA support in this MPI)"


@pytest.mark.parametrize(
    ("facts", "levels"),
    [
        ({"devices": 0}, {"GPU": "ok"}),
        (
            {"devices": 4, "transport": DIRECT, "cupy": "14", "nccl": "2"},
            {"GPU": "ok", "CUDA awareness": "ok", "CuPy": "ok", "NCCL": "ok"},
        ),
        (
            {"devices": 4, "transport": STAGED, "cupy": "14", "nccl": None},
            {"GPU": "ok", "CUDA awareness": "note", "CuPy": "ok", "NCCL": "note"},
        ),
        (
            {"devices": 1, "transport": STAGED, "cupy": None, "nccl": None},
            {"GPU": "ok", "CUDA awareness": "note", "CuPy": "error"},
        ),
    ],
)
def test_devices(facts, levels):
    assert {finding.name: finding.level for finding in findings.gpu(facts)} == levels
