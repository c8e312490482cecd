"""Starting real jobs with a time limit."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SMALL = [
    "model.layers=2", "model.width=12", "model.heads=3", "model.context=16", "train.batch=6", "train.microbatches=2",
    "train.warmup=2", "run.steps=3", "run.eval_batches=1",
]  # fmt: skip


@dataclass
class Ended:
    status: int
    output: str
    seconds: float


class Job:
    """A command in a session of its own, its output in a file; `wait` ends it after `limit` seconds."""

    def __init__(self, command, folder, environment):
        self.log = folder / "output.log"
        self.started = time.monotonic()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **environment},
                start_new_session=True,
            )  # fmt: skip

    def wait(self, limit=60):
        try:
            status = self.process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, 9)
            pytest.fail(f"the job did not end within {limit} s:\n{self.output[-3000:]}")
        return Ended(status, self.output, time.monotonic() - self.started)

    @property
    def output(self):
        return self.log.read_text(errors="replace")

    def wait_for(self, text, limit=60):
        """Until the output holds `text`."""
        while text not in self.output:
            assert self.process.poll() is None, self.output
            assert time.monotonic() < self.started + limit, self.output
            time.sleep(0.05)

    @property
    def mpirun(self):
        """The process id of jobs/guard.py's child."""
        (pid,) = children(self.process.pid)
        return pid

    def pid_of_rank(self, rank):
        """mpirun's child that is this rank."""
        mine = f"OMPI_COMM_WORLD_RANK={rank}".encode()
        for pid in children(self.mpirun):
            if mine in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return pid
        raise AssertionError(f"no rank {rank} among the children of {self.mpirun}")


def children(pid):
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def warm(command):
    """The command with its program forked from the server of jobs/test.sbatch, where there is one (`warm.py`)."""
    first = next(n for n, word in enumerate(command) if word == sys.executable or Path(word).name == "hpctrain")
    client = [sys.executable, "-IS", str(ROOT / "tests/warm.py")] if "HPCTRAIN_WARM" in os.environ else []
    return [*command[:first], *client, *command[first:]]


def begin_job(folder, ranks, *command, cold=False, **environment):
    """A job of that many ranks, its output in the folder."""
    launcher = os.environ.get("MPIRUN", str(ROOT / "jobs/mpirun.sh"))
    return Job([launcher, "-n", str(ranks), *(command if cold else warm(command))], folder, environment)


@pytest.fixture
def start(tmp_path):
    """start(ranks, command, ...) begins a job of that many ranks; cold=True where signals go to their process ids."""
    jobs = []

    def begin(ranks, *command, cold=False, **environment):
        jobs.append(begin_job(tmp_path, ranks, *command, cold=cold, **environment))
        return jobs[-1]

    yield begin
    for job in jobs:
        if job.process.poll() is None:
            os.killpg(job.process.pid, 9)


def write_text(folder):
    path = folder / "text.txt"
    path.write_text("".join(f"{n} times {n} is {n * n}\n" for n in range(400)))
    return path


@pytest.fixture
def text(tmp_path):
    """A little corpus."""
    return write_text(tmp_path)


@pytest.fixture
def python():
    return sys.executable
