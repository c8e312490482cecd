"""The job scripts under a real Slurm: one controller and three nodes on this machine, started for the tests."""

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

pytestmark = pytest.mark.job

NODES = ("n1", "n2", "n3")
NEEDED = ("slurmctld", "slurmd", "sbatch", "munged")


def absent():
    missing = [program for program in NEEDED if not shutil.which(program, path=os.environ["PATH"] + ":/usr/sbin:/sbin")]
    if missing:
        return f"no Slurm here: {', '.join(missing)} not found (Debian: apt-get install slurm-wlm munge)"
    return None if os.getuid() == 0 else "a Slurm of one's own takes root"


@pytest.fixture(scope="module")
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
        parent.chmod(0o755)  # munged refuses a socket that others cannot reach
    nodes = "\n".join(
        f"NodeName={node} NodeHostname={host} Port={free_port()} CPUs={os.cpu_count()} RealMemory=4000 State=UNKNOWN"
        for node in NODES
    )
    conf = folder / "slurm.conf"
    conf.write_text(f"""
ClusterName=test
SlurmctldHost={host}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={socket_path},cred_expire=10
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
    environment = {k: v for k, v in slurm.items() if not k.startswith(inherited) or k == "SLURM_CONF"}
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
def ended(shell):
    """ended(job) waits for a job's end; returns its state and exit status. `sbatch --wait` looks ever less often."""

    def wait(job, limit=240):
        deadline = time.monotonic() + limit
        while True:
            facts = shell("scontrol", "show", "job", job)
            state = re.search(r"JobState=(\w+)", facts)[1]
            if state not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED"):
                return state, int(re.search(r"ExitCode=(\d+)", facts)[1])
            assert time.monotonic() < deadline, facts
            time.sleep(0.3)

    return wait


TRAIN = str(ROOT / "jobs/train.sbatch")


def final(output):
    (line,) = [line for line in output.splitlines() if line.startswith("final training loss")]
    return line


def test_sbatch_of_the_main_job(sbatch, ended, shell, small, tmp_path):
    """Submitted from another folder; the ranks follow the allocation; the losses are those of `bash`."""
    job = sbatch("--ntasks=2", "--output=job.out", TRAIN, *small)
    # too few tasks for the grid: the job fails, and says why
    refused = sbatch("--ntasks=1", "--output=refused.out", TRAIN, *small)
    assert ended(job) == ("COMPLETED", 0)
    output = (tmp_path / "job.out").read_text()
    assert "grid of 2 ranks" in output
    assert final(output) == final(shell("bash", TRAIN, *small, "run.name=bash"))
    assert ended(refused) == ("FAILED", 2)
    assert "has 2 places, but there are 1 ranks" in (tmp_path / "refused.out").read_text()


def test_submit_over_two_nodes(shell, small, tmp_path):
    """Followed to its end; listed by `hpctrain jobs`; refused before it is queued where the job would refuse it."""
    hpctrain = shutil.which("hpctrain")
    output = shell(hpctrain, "submit", TRAIN, "--nodes", "2", *small, "--time", "5", "--follow")
    job = re.match(r"job (\d+), log (.*)", output)
    assert "grid of 2 ranks" in output
    assert f"job {job[1]}: COMPLETED" in output
    assert final(output) == final(Path(job[2]).read_text())
    assert "NumNodes=2" in shell("scontrol", "show", "job", job[1])
    header, line = shell(hpctrain, "jobs").splitlines()
    assert header.split() == ["job", "state", "run", "step", "loss", "tokens/s"]
    assert line.split()[:4] == [job[1], "COMPLETED", "gpt2", "3"]
    assert "unknown key run.stpes" in shell(hpctrain, "submit", TRAIN, "run.stpes=3", status=2)
    assert "sbatch refused the job" in shell(hpctrain, "submit", TRAIN, "--time=soon", status=2)


def test_a_study_as_jobs(shell, small, ended, tmp_path):
    """One job a point; the second waits for the first; both are in the report."""
    (tmp_path / "job.toml").write_text("")
    settings = [word for word in small if not word.startswith("grid.")]
    study = ["scale", str(tmp_path / "job.toml"), *settings, "--ranks=1,2", "--weak", "--repeat=1", "--steps=1"]
    hpctrain = shutil.which("hpctrain")
    output = shell(hpctrain, *study, "--submit", "-o", "study")
    first, second = re.findall(r"job (\d+): [12] ranks", output)
    assert f"Dependency=afterany:{first}" in shell("scontrol", "show", "job", second)
    assert ended(first) == ended(second) == ("COMPLETED", 0)
    results = [json.loads(line) for line in (tmp_path / "study/results.jsonl").read_text().splitlines()]
    assert [(result["ranks"], result["slurm_job"]) for result in results] == [(1, first), (2, second)]
    assert (tmp_path / "study/report.html").read_text().count("<td>1×1×1×1×1</td>") == 1
    assert "add --submit, or begin with salloc" in shell(hpctrain, *study, status=2)  # not on the login node


def test_jobs_that_end_early(sbatch, ended, shell, small, tmp_path):
    """A warned job saves, is requeued, and ends with the losses of one that was left alone; one over its time limit and
    a cancelled one say so; the tasks of an array have their own seeds."""
    limited, cancelled = (sbatch("--nodelist=n3", "--wrap=sleep 300") for _ in range(2))
    common = ["--ntasks=2", TRAIN, *small, "run.steps=400"]
    warned = sbatch("--output=warned.out", *common, "run.name=warned")
    alone = sbatch("--output=alone.out", *common, "run.name=alone")
    array = sbatch("--array=0-1", "--output=array-%a.out", *common, "run.steps=2", "run.seed=%a", "run.name=seed-%a")
    until(lambda: "step " in read(tmp_path / "warned.out"))
    shell("scancel", "--batch", "--signal=USR1", warned)
    shell("scontrol", "update", f"JobId={limited}", "EndTime=now+1seconds")
    shell("scancel", cancelled)
    assert ended(alone) == ("COMPLETED", 0)
    assert ended(warned) == ("COMPLETED", 0)
    log = read(tmp_path / "warned.out")  # appended to
    assert "stopped by SIGUSR1 after step" in log
    assert f"saved; requeueing job {warned}" in log
    assert "resumed after step" in log
    one, other = (
        [json.loads(line)["loss"] for line in read(tmp_path / f"runs/{name}/metrics.jsonl").splitlines()]
        for name in ("warned", "alone")
    )
    assert len(one) == 400
    assert one == other
    assert "Restarts=1" in shell("scontrol", "show", "job", warned)
    assert ended(array) == ("COMPLETED", 0)
    until(lambda: all("final training loss" in read(tmp_path / f"array-{task}.out") for task in (0, 1)))
    assert final(read(tmp_path / "array-0.out")) != final(read(tmp_path / "array-1.out"))
    assert ended(cancelled)[0] == "CANCELLED"
    assert ended(limited)[0] == "TIMEOUT"


def read(path):
    return path.read_text() if path.exists() else ""


def until(true, limit=120):
    deadline = time.monotonic() + limit
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)
