"""`hpctrain train` with pipeline.schedule = "ampnet": stopped, resumed and replayed, and a rank that fails."""

import json
import os
import signal
from pathlib import Path

import pytest

pytestmark = pytest.mark.job

AMPNET = [
    "grid.data=1", "grid.pipeline=2", "grid.tensor=1", "pipeline.schedule=ampnet", "train.clip=0", "model.tied=false",
    "train.microbatches=4", "train.batch=6", "precision.compute=fp64", "run.sample=0",
]  # fmt: skip


def losses(folder):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(record["step"], record["loss"], record["grad_norm"]) for record in records], records[-1]


def succeeds(job, limit=90):
    ended = job.wait(limit)
    assert ended.status == 0, ended.output
    return ended


@pytest.mark.slow
def test_stopped_in_the_middle_resumed_and_replayed(train, tmp_path):
    """A run in one go that repeats the order of messages has the same losses and norms, to the bit."""
    some = [*AMPNET, "pipeline.max_active_keys=3", "pipeline.min_update_frequency=3", "run.steps=40"]
    parts = [*some, "run.name=parts", "pipeline.record=true"]
    job = train(2, *parts, cold=True)
    job.wait_for("/40  loss")
    os.kill(job.pid_of_rank(0), signal.SIGHUP)  # which MPI takes when it begins; after that it is the job's again
    ended = job.wait(60)
    assert "stopped by SIGHUP" in ended.output
    assert "saved, go on with --resume" in ended.output, ended.output
    ended = succeeds(train(2, *parts, "--resume"))
    assert "resumed after step" in ended.output
    succeeds(train(2, *some, "run.name=whole", f"pipeline.replay={tmp_path / 'runs/parts'}"))
    (whole, last), (parts, _) = (losses(tmp_path / "runs" / name) for name in ("whole", "parts"))
    assert parts == whole
    assert sum(last["nodes"]["stage 1"]["staleness"]) == 4 * 40
    assert len(last["occupancy"]) == 2


def test_an_exception_on_one_rank(train, python):
    script = str(Path(__file__).with_name("raise_in_step.py"))
    ended = train(2, *AMPNET, "run.steps=100000", program=(python, script)).wait(30)
    assert ended.status != 0
    assert "hpctrain: rank 1 of 2 failed:" in ended.output
    assert "ArithmeticError: one rank alone" in ended.output
