"""Jobs that are killed, warned, starved, fed with nonsense: each ends well, and goes on with the same bits."""

import os
import random
import signal
import subprocess
import time

import pytest
from conftest import losses, metrics

from hpctrain.train.checkpoint import folder

SLOW_SAVE = "from hpctrain.train.checkpoint import shards; import time; "
SLOW_SAVE += "patch(shards, 'write', lambda f: lambda *a: (print('saving', flush=True), time.sleep(1), f(*a))[2])"
SLOW_STEP = "from hpctrain.train.trainer import Trainer; import time; "
SLOW_STEP += "patch(Trainer, 'step', lambda f: lambda *a: (time.sleep(0.1), f(*a))[1])"


@pytest.fixture
def run(tmp_path):
    return tmp_path / "runs/run"


def ends(job, status, *texts, within=30):
    ended = job.wait(within)
    assert ended.status == status, ended.output
    for text in texts:
        assert text in ended.output, ended.output
    return ended


def resumes(tiny, run, uninterrupted, *options):
    """Goes on to the end, with the bits of the run that nothing happened to."""
    ended = ends(tiny(2, "--resume", *options), 0, "final training loss")
    assert losses(run) == uninterrupted
    assert not list(run.glob("checkpoints/*.tmp"))
    return ended.output


@pytest.mark.parametrize("seed", [0, 1])
def test_killed_at_a_random_moment(tiny, run, uninterrupted, seed):
    """A rank, or mpirun with its ranks left alone: `benchmarks/faults.py` does 50."""
    generator = random.Random(seed)
    job = tiny(2, faults=SLOW_STEP)
    job.wait_for("step  1/12")
    time.sleep(generator.uniform(0, 1.5))
    os.kill(job.pid_of_rank(generator.randrange(2)) if seed % 2 else job.process.pid, signal.SIGKILL)
    assert job.wait(20).status != 0
    wait_until_gone(run)
    output = resumes(tiny, run, uninterrupted)
    assert "resumed after step" in output or not (run / "checkpoints").exists()


def wait_until_gone(run, limit=15):
    """Until no process writes the folder: its lock is free."""
    end = time.monotonic() + limit
    lock = run.with_name(f".{run.name}.lock")
    while subprocess.run(["flock", "-n", str(lock), "true"]).returncode:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_signals(tiny, run, uninterrupted):
    """USR1 twice during a save; when resumed, TERM to one rank; each time all save once and end with 85."""
    job = tiny(2, faults=SLOW_SAVE)
    job.wait_for("saving")
    for _ in range(2):
        job.process.send_signal(signal.SIGUSR1)  # mpirun passes it to its ranks
    ended = ends(job, 85, "stopped by SIGUSR1 after step")
    assert ended.output.count("stopped by") == 1
    stopped = len(metrics(run))
    assert folder.steps(run / "checkpoints")[0] == stopped
    job = tiny(2, "--resume", faults=SLOW_STEP)
    job.wait_for(f"step {stopped + 1:2d}/12")
    os.kill(job.pid_of_rank(1), signal.SIGTERM)
    ends(job, 85, "stopped by SIGTERM after step")
    assert folder.steps(run / "checkpoints")[0] == len(metrics(run)) > stopped
    resumes(tiny, run, uninterrupted)


def test_the_clock_and_a_second_job(tiny, run):
    """The second one on the same folder is refused; the first stops by run.max_seconds, and is saved only then."""
    options = "run.checkpoint_every=0", "run.steps=100000"
    first = tiny(2, "run.max_seconds=9", *options, faults=SLOW_STEP)
    first.wait_for("grid of 2 ranks")
    log = first.log.rename(first.log.with_name("first.log"))
    second = ends(tiny(2, "--resume"), 2, "hpctrain: error: another job is writing", str(run))
    assert f"process {first.pid_of_rank(0)} on" in second.output
    assert second.output.count("hpctrain: error") == 1
    assert first.process.wait(30) == 85
    assert "stopped by run.max_seconds after step" in log.read_text()
    assert folder.steps(run / "checkpoints") == [len(metrics(run))]


def test_a_damaged_checkpoint(tiny, run, uninterrupted):
    """Said loudly; the one before it is used, on the same grid."""
    ends(tiny(2, "checkpoint.keep=3"), 0)
    newest = run / "checkpoints/step-12"
    content = bytearray((newest / "rank-00001.h5").read_bytes())
    content[len(content) // 2] ^= 16
    (newest / "rank-00001.h5").write_bytes(content)
    output = resumes(tiny, run, uninterrupted, "checkpoint.keep=3")
    assert f"WARNING: checkpoint step-12 is not used: {newest}/rank-00001.h5 does not have the SHA-256" in output
    assert "resumed after step 9" in output
    assert (run / "checkpoints/step-12.bad").exists()
    verified = subprocess.run(["hpctrain", "checkpoint", "verify", str(run)], capture_output=True, text=True)
    assert verified.returncode == 0, verified.stdout
    # and a requeued job that had finished ends at once
    assert "resumed after step 12" in resumes(tiny, run, uninterrupted)


def test_a_failed_write_on_one_rank(tiny, run):
    """Rank 1 can write no file of more than 5,000 bytes."""
    full = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    full += "rank == 1 and resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))"
    ended = ends(tiny(2, "run.steps=6", faults=full), 0, "WARNING: no checkpoint of step 3: rank 1: ", "File too large")
    assert "no checkpoint of step 6" in ended.output
    assert list((run / "checkpoints").iterdir()) == []
    ended = ends(tiny(2, "checkpoint.on_failure=stop", faults=full), 1, "error: no checkpoint of step 3: rank 1: ")
    assert ended.output.count("hpctrain: error") == 1


@pytest.mark.parametrize("where", ["save", "load"])
def test_an_exception_on_one_rank(tiny, where):
    """In the middle of a save, and of a load (that of a rollback, so that one job will do)."""
    module, function = {"save": ("shards", "write"), "load": ("load", "load")}[where]
    faults = f"from hpctrain.train.checkpoint import {module}; "
    faults += f"rank and patch({module}, '{function}', lambda f: lambda *a: 1 / 0)"
    options = ()
    if where == "load":
        faults += "; " + NAN
        options = ("sanity.nonfinite=rollback",)
    job = tiny(2, *options, faults=faults)
    ended = job.wait(20)
    assert ended.status not in (0, 85)
    assert "rank 1: ZeroDivisionError" in ended.output or "rank 1 of 2 failed" in ended.output, ended.output


NAN = """
from hpctrain.train.trainer import Trainer
import dataclasses
def once(step):
    seen = []
    def poisoned(self, batches):
        seen.append(1)
        if len(seen) == 5 and self.grid.rank == 1:
            batches = [dataclasses.replace(batch, scale=float('nan')) for batch in batches]
        return step(self, batches)
    return poisoned
patch(Trainer, 'step', once)
"""


def test_nan_on_one_rank(tiny, run):
    """In the fifth step's gradient. All ranks leave the step out, or all go back and on with the data after it."""
    ended = ends(tiny(2, "sanity.nonfinite=skip", faults=NAN), 0, "WARNING: step 5 is skipped: loss ")
    assert ended.output.count("is skipped") == 1
    records = metrics(run)
    assert [r["step"] for r in records if "skipped" in r] == [5]
    assert records[4]["loss"] is None
    ends(tiny(2, "sanity.nonfinite=rollback", faults=NAN), 0, "back to step 3, and on with the data after it")
    records = metrics(run)
    assert [r["step"] for r in records] == list(range(1, 13))
    assert all(r["loss"] is not None for r in records)
    ends(tiny(2, faults=NAN), 1, "hpctrain: error: loss ", "are not both finite")


def test_a_weight_that_differs_by_a_bit(tiny, run):
    """Flipped on rank 1 of three after step 4; found at the next comparison, before the next checkpoint."""
    flip = """
from hpctrain.train.trainer import Trainer
import torch
def flipping(step):
    seen = []
    def flipped(self, batches):
        result = step(self, batches)
        seen.append(1)
        if len(seen) == 4 and self.grid.rank == 1:
            self.model.blocks['1'].mlp.up.weight.data.view(torch.int32)[0, 0] ^= 1
        return result
    return flipped
patch(Trainer, 'step', flipping)
"""
    ended = ends(tiny(3, "sanity.check_every=5", faults=flip), 1, "hpctrain: error: step 5: blocks.1.mlp.up.weight")
    assert "blocks.1.mlp.up.weight of rank 1 differs from that of the other 2 ranks" in ended.output
    assert folder.steps(run / "checkpoints") == [3]


def test_a_stopped_rank(tiny):
    """SIGSTOP of rank 1: rank 0 says whom it waits for, what it did, where it is; the job ends."""
    job = tiny(2, "comm.watchdog=3", "run.steps=100000", "run.checkpoint_every=0", faults=SLOW_STEP)
    job.wait_for("step")
    time.sleep(0.5)
    os.kill(job.pid_of_rank(1), signal.SIGSTOP)
    ended = job.wait(30)
    assert ended.status not in (0, 85)
    for text in ("hpctrain: rank 0 of 2", "it waits for rank 1 (", "rank 0, its last operations:", "all_reduce along ",
                 "rank 0, its stack:", "trainer.py"):  # fmt: skip
        assert text in ended.output, ended.output


def test_a_slow_rank_in_a_save_is_waited_for(tiny, run, uninterrupted):
    """Well below the watchdog's limit."""
    slow = SLOW_SAVE.replace("patch(", "rank and patch(").replace("sleep(1)", "sleep(2)")
    ends(tiny(2, "comm.watchdog=60", "run.checkpoint_every=6", faults=slow), 0)
    assert losses(run) == uninterrupted
    assert folder.steps(run / "checkpoints") == [12, 6]
