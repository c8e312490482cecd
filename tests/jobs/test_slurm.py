"""The job scripts under a real Slurm: one controller and one node on this machine, started for the test."""

import os
import re
import shutil
import socket
import subprocess
import time

import pytest
from conftest import ROOT

pytestmark = pytest.mark.job

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
    for name in ("state", "spool"):
        (folder / name).mkdir()
    host = socket.gethostname()
    socket_path, key = folder / "munge.socket", folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    folder.chmod(0o755)
    for parent in list(folder.parents)[:2]:
        parent.chmod(0o755)  # munged refuses a socket that others cannot reach
    conf = folder / "slurm.conf"
    conf.write_text(f"""
ClusterName=test
SlurmctldHost={host}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={socket_path}
SlurmctldPort={free_port()}
SlurmdPort={free_port()}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
NodeName={host} CPUs={os.cpu_count()} RealMemory=4000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
""")
    environment = {**os.environ, "PATH": os.environ["PATH"] + ":/usr/sbin:/sbin", "SLURM_CONF": str(conf)}
    commands = [
        ["munged", "--foreground", "--force", f"--socket={socket_path}", f"--key-file={key}",
         f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/munged.seed", f"--log-file={folder}/munged.log"],
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", host],
    ]  # fmt: skip
    daemons = []
    try:
        for command in commands:
            with (folder / f"{command[0]}.out").open("w") as out:
                daemons.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment))
            time.sleep(1)
        deadline = time.monotonic() + 60
        while (
            "idle"
            not in subprocess.run(["sinfo", "-h", "-o", "%T"], capture_output=True, text=True, env=environment).stdout
        ):
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


def test_sbatch_of_the_main_job(slurm, tmp_path):
    """Submitted from another folder; the ranks follow the allocation; the losses are those of `bash`."""
    arguments = ["run.steps=3", "run.sample=0", f"run.out={tmp_path}/runs"]
    environment = {k: v for k, v in slurm.items() if not k.startswith(("HPCTRAIN_", "MPIRUN", "VIRTUAL_ENV"))}
    script = str(ROOT / "jobs/train.sbatch")
    submitted = subprocess.run(
        ["sbatch", "--wait", "--output=job.out", script, *arguments],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    output = (tmp_path / "job.out").read_text()
    assert submitted.returncode == 0, submitted.stderr + output
    assert re.match(r"Submitted batch job \d+", submitted.stdout)
    assert "grid of 8 ranks" in output
    by_bash = subprocess.run(
        ["bash", script, *arguments, "run.name=bash"], cwd=tmp_path, capture_output=True, text=True, timeout=180
    )
    final = [line for line in output.splitlines() if line.startswith("final training loss")]
    assert len(final) == 1
    assert final[0] in by_bash.stdout

    # too few tasks for the grid: the job fails, and says why
    refused = subprocess.run(
        ["sbatch", "--wait", "--ntasks=4", "--output=refused.out", script, *arguments],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert refused.returncode == 2
    assert "has 8 places, but there are 4 ranks" in (tmp_path / "refused.out").read_text()
