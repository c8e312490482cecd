"""Jobs that are killed, warned and stopped from outside: each ends well, and goes on with the same bits."""

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
from tiny_jobs import losses, metrics

from hpctrain.checkpoint import folder

TRAIN = "train('run.name=run')"
RESUME = "train('run.name=run', '--resume=auto')"
SLOWLY = """
from hpctrain.train.trainer import Trainer
import time
patch(Trainer, 'forward_backward', lambda step: lambda *a: (time.sleep(0.1), step(*a))[1])
"""


@pytest.fixture
def run(tmp_path):
    return tmp_path / "runs/run"


def wait_until_gone(run, limit=20):
    """Until the process that writes the folder has ended."""
    (lease,) = run.parent.glob(".run.lease.*")
    end = time.monotonic() + limit
    while Path(f"/proc/{json.loads(lease.read_text())['pid']}").exists():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("who", ["a rank", pytest.param("mpirun", marks=pytest.mark.slow)])
def test_killed_at_a_random_moment(tiny, run, who):
    """Of mpirun, the ranks are left alone. `benchmarks/faults.py` does 50 seeds of this."""
    generator = random.Random(who)
    job = tiny(f"{SLOWLY}{TRAIN}", cold=True)
    job.wait_for("step  1/12")
    time.sleep(generator.uniform(0, 1.5))
    os.kill(job.pid_of_rank(generator.randrange(2)) if who == "a rank" else job.process.pid, signal.SIGKILL)
    assert job.wait(30).status != 0
    wait_until_gone(run)
    saved = folder.steps(run / "checkpoints")
    resumed = tiny(f"{RESUME}\ntrain('run.name=whole')").wait()
    assert resumed.status == 0, resumed.output
    assert ("resumed after step" in resumed.output) == bool(saved)
    assert losses(run) == losses(run.with_name("whole"))
    assert not list(run.glob("checkpoints/*.tmp"))


def test_a_second_job_and_the_warning(tiny, run):
    """Another job on the same folder is refused. mpirun passes SIGUSR1 on, twice; all save after one step, once."""
    first = tiny(f"{SLOWLY}train('run.name=run', 'run.checkpoint_every=0', 'run.steps=2000')", cold=True)
    first.wait_for("step    1/2000")
    first.log = first.log.rename(first.log.with_name("first.log"))
    second = tiny(RESUME).wait()
    assert second.status == 2, second.output
    assert second.output.count("hpctrain: error") == 1
    assert f"another job is writing {run} (process {first.pid_of_rank(0)} on " in second.output
    for _ in range(2):
        first.process.send_signal(signal.SIGUSR1)
    ended = first.wait()
    assert ended.status == 85, ended.output
    assert ended.output.count("stopped by SIGUSR1 after step") == 1
    assert folder.steps(run / "checkpoints") == [len(metrics(run))]


def test_a_stopped_rank(tiny):
    """SIGSTOP of rank 1: rank 0 says whom it waits for, what it did, where it is; the job ends."""
    job = tiny(f"{SLOWLY}train('comm.watchdog=3', 'run.steps=2000', 'run.checkpoint_every=0')", cold=True)
    job.wait_for("step    1/2000")
    time.sleep(0.5)
    os.kill(job.pid_of_rank(1), signal.SIGSTOP)
    ended = job.wait()
    assert ended.status not in (0, 85)
    for text in ("hpctrain: rank 0 of 2", "it waits for rank 1 (", "rank 0, its last operations:", "all_reduce along ",
                 "rank 0, its stack:", "trainer.py"):  # fmt: skip
        assert text in ended.output, ended.output


def test_a_job_that_was_stopped_goes_on(tiny, run):
    """SIGSTOP of all ranks for longer than the watchdog's limit, then SIGCONT, as `scontrol suspend` does."""
    # rank 0 waits
    slow = "patch(Trainer, 'forward_backward', lambda step: lambda *a: (time.sleep(0.2 * rank), step(*a))[1])"
    job = tiny(
        f"""
import time
from hpctrain.train.trainer import Trainer
{slow}
train('run.name=run', 'comm.watchdog=4', 'run.checkpoint_every=0')
""",
        cold=True,
    )
    job.wait_for("step  2/12")
    pids = [job.pid_of_rank(rank) for rank in range(2)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(5)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    ended = job.wait()
    assert ended.status == 0, ended.output
    assert "is stuck" not in ended.output
    assert len(metrics(run)) == 12


@pytest.mark.parametrize("where", ["write", "load"])
def test_an_exception_on_one_rank(tiny, where):
    """In the middle of a save, and of the load of a rollback: the job ends with its name, without waiting."""
    module = {"write": "shards", "load": "reading"}[where]
    job = tiny(f"""
from hpctrain.checkpoint import {module}
rank and patch({module}, '{where}', lambda f: lambda *a: 1 / 0)
import dataclasses
at_step(5, lambda trainer, batches: [dataclasses.replace(b, scale=float('nan')) for b in batches])
train('sanity.nonfinite=rollback')
""")
    ended = job.wait()
    assert ended.status not in (0, 2, 85)
    assert "ZeroDivisionError: division by zero" in ended.output
    assert "hpctrain: rank 1 of 2 failed" in ended.output or "rank 1: ZeroDivisionError" in ended.output
