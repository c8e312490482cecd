"""The main job where the site's launcher is srun: an MPI of Slurm's kind (MPICH, by PMI2) in place of the Open MPI."""

import hashlib
import json
import shutil
import subprocess
import sys
import sysconfig

import pytest
from cluster import final, read, until
from running import ROOT

pytestmark = pytest.mark.job


@pytest.fixture
def train(shell, tmp_path):
    """The job script of a checkout whose environment has MPICH and all else from this one."""
    if "pmi2" not in shell("srun", "--mpi=list"):
        pytest.skip("this Slurm has no PMI2, by which MPICH's wheel is started")
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT / "jobs", checkout / "jobs")
    for name in ("hpctrain", "setup.cfg", "pyproject.toml", "README.md"):
        (checkout / name).symlink_to(ROOT / name)
    venv = checkout / ".venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    python = [str(venv / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # 5 leaves shared memory behind that is named after the step: one that was killed and requeued fails at its start
    if subprocess.run([*python, "mpich>=4.2,<5"], check=False).returncode:
        pytest.skip("MPICH's wheel cannot be installed here")
    # what this environment has, after MPICH, so that MPICH is the one found
    (next(venv.glob("lib/python3*/site-packages")) / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    subprocess.run([*python, "--no-deps", "-e", str(checkout)], check=True)
    library = [str(venv / "bin/python"), "-c", "from mpi4py import MPI; print(MPI.Get_library_version())"]
    assert "MPICH" in subprocess.run(library, check=True, capture_output=True, text=True).stdout
    facts = hashlib.sha256(b"".join((ROOT / name).read_bytes() for name in ("setup.cfg", "jobs/constraints.txt")))
    (venv / ".hpctrain-base").write_text(f"site {facts.hexdigest()}  -\n")  # as jobs/env.sh would leave it
    return str(checkout / "jobs/train.sbatch")


@pytest.mark.slow
def test_srun_starts_the_ranks(train, sbatch, ended, shell, small, tmp_path):
    """One over two nodes is warned, saves, is requeued, and ends with the losses of one that was left alone."""
    # one thread a rank on two nodes and on one: products of other threads are rounded otherwise
    settings = "HPCTRAIN_MPI=site,HPCTRAIN_LAUNCHER=srun --mpi=pmi2 --overcommit,OMP_NUM_THREADS=1"
    common = ["--ntasks=2", f"--export=ALL,{settings}", train, *small, "run.steps=100", "comm.watchdog=60"]
    warned = sbatch("--nodes=2", "--output=warned.out", *common, "run.name=warned")
    alone = sbatch("--nodes=1", "--output=alone.out", *common, "run.name=alone")
    until(lambda: "step " in read(tmp_path / "warned.out"))
    shell("scancel", "--batch", "--signal=USR1", warned)
    states = ended(warned), ended(alone)
    log = read(tmp_path / "warned.out")
    assert states == (("COMPLETED", 0),) * 2, log
    assert "grid of 2 ranks" in log
    assert f"saved; requeueing job {warned}" in log
    one, other = (
        [json.loads(line)["loss"] for line in read(tmp_path / f"runs/{name}/metrics.jsonl").splitlines()]
        for name in ("warned", "alone")
    )
    assert len(one) == 100
    assert one == other
    assert final(log.rpartition("resumed after step")[2]) == final(read(tmp_path / "alone.out"))
