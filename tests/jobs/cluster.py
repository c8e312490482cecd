"""A real Slurm for the tests: one controller and three nodes on this machine."""

import json
import os
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest
from running import ROOT, SMALL

NODES = ("n1", "n2", "n3")
NEEDED = ("slurmctld", "slurmd", "sbatch", "munged")


def absent():
    missing = [program for program in NEEDED if not shutil.which(program, path=os.environ["PATH"] + ":/usr/sbin:/sbin")]
    if missing:
        return f"no Slurm here: {', '.join(missing)} not found (Debian: apt-get install slurm-wlm munge)"
    return None if os.getuid() == 0 else "a Slurm of one's own takes root"


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    """Environment variables under which sbatch reaches the cluster."""
    if reason := absent():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", *NODES):
        (folder / name).mkdir()
    host = socket.gethostname()
    socket_path, key = folder / "munge.socket", folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    folder.chmod(0o755)
    for parent in list(folder.parents)[:2]:
        parent.chmod(parent.stat().st_mode | 0o055)  # munged refuses a socket that others cannot reach
    nodes = "\n".join(
        f"NodeName={node} NodeHostname={host} Port={free_port()} CPUs={os.cpu_count()} RealMemory=4000 State=UNKNOWN"
        for node in NODES
    )
    # a minute in place of Slurm's or of a test's 10 s, as the nodes share their cores with all other tests: with PMI2,
    # ranks whose fence was given up wait for ever; mpirun ends where the step that it needs comes after its credential
    # has expired; a batch script that is not seen in time is taken for lost. A requeued job waits for it, too.
    conf = folder / "slurm.conf"
    conf.write_text(f"""
ClusterName=test
SlurmctldHost={host}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={socket_path},cred_expire=60
SlurmctldPort={free_port()}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
KillWait=2
MessageTimeout=60
BatchStartTimeout=60
MinJobAge=3600
SchedulerParameters=batch_sched_delay=0,sched_interval=1
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
""")
    environment = {**os.environ, "PATH": os.environ["PATH"] + ":/usr/sbin:/sbin", "SLURM_CONF": str(conf)}
    commands = [
        ["munged", "--foreground", "--force", f"--socket={socket_path}", f"--key-file={key}",
         f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/munged.seed", f"--log-file={folder}/munged.log"],
        ["slurmctld", "-D"],
        *(["slurmd", "-D", "-N", node] for node in NODES),
    ]  # fmt: skip
    daemons = []
    try:
        for command in commands:
            with (folder / f"{command[0]}{len(daemons)}.out").open("w") as out:
                daemons.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment))
            time.sleep(0.5)
        deadline = time.monotonic() + 60
        sinfo = ["sinfo", "-h", "-N", "-o", "%T"]
        while subprocess.run(sinfo, capture_output=True, text=True, env=environment).stdout.split() != ["idle"] * 3:
            assert time.monotonic() < deadline, "".join(p.read_text() for p in folder.glob("*.out"))
            time.sleep(0.5)
        yield environment
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(30)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture
def small(text, tmp_path):
    """Arguments that make the main job a small one, of two ranks."""
    grid = ["grid.data=2", "grid.pipeline=1", "grid.tensor=1"]
    return [f"data.text=[{json.dumps(str(text))}]", *grid, "run.sample=0", f"run.out={tmp_path}/runs", *SMALL]


@pytest.fixture
def shell(slurm, tmp_path):
    """shell(command, ...) runs it beside the cluster, as a user who has just logged in; its output is one text."""
    inherited = ("HPCTRAIN_", "MPIRUN", "OMPI_", "PRTE_", "SLURM_")
    # all nodes have the same cores: ranks that wait must let those of other nodes work
    waiting = "OMPI_MCA_mpi_yield_when_idle", "OMPI_MCA_threads_pthreads_yield_strategy"
    kept = ("SLURM_CONF", "HPCTRAIN_WARM", *waiting)
    environment = {k: v for k, v in slurm.items() if not k.startswith(inherited) or k in kept}
    environment["XDG_STATE_HOME"] = str(tmp_path / "state")

    def run(*command, status=0, limit=120):
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=limit,
        )  # fmt: skip
        assert done.returncode == status, done.stdout + "".join(p.read_text() for p in tmp_path.glob("*.out"))
        return done.stdout

    return run


@pytest.fixture
def sbatch(shell):
    """sbatch(argument, ...) submits a job; returns its number."""
    return lambda *arguments: shell("sbatch", "--parsable", *arguments).strip()


@pytest.fixture
def ended(slurm, shell, tmp_path):
    """ended(job) waits for a job's end; returns its state and exit status, and prints the last lines of all outputs
    where that is a failure. `sbatch --wait` looks ever less often."""

    def last_lines():
        for folder in (Path(slurm["SLURM_CONF"]).parent, tmp_path):
            for path in sorted(folder.glob("*.out")):
                yield "\n".join((f"== {path.name}", *path.read_text().splitlines()[-30:]))

    def wait(job, limit=240):
        deadline = time.monotonic() + limit
        while True:
            facts = shell("scontrol", "show", "job", job)
            state = re.search(r"JobState=(\w+)", facts)[1]
            if state not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED"):
                if state != "COMPLETED":
                    print(facts, *last_lines(), sep="\n")
                return state, int(re.search(r"ExitCode=(\d+)", facts)[1])
            if time.monotonic() > deadline:
                raise AssertionError("\n".join((facts, *last_lines())))
            time.sleep(0.3)

    return wait


@pytest.fixture
def jobs(warm_checkout):
    """The folder of job scripts whose ranks are warm."""
    return warm_checkout / "jobs"


TRAIN = str(ROOT / "jobs/train.sbatch")


def final(output):
    (line,) = [line for line in output.splitlines() if line.startswith("final training loss")]
    return line


def read(path):
    return path.read_text() if path.exists() else ""


def until(true, limit=120):
    deadline = time.monotonic() + limit
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)
