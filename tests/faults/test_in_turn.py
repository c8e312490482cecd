"""Faults that a job survives or ends by itself, one after the other in the same two processes, to save time."""

import os
import shutil

import pytest
import torch
from running import begin_job, write_text
from safetensors.torch import load_file
from tiny_jobs import command, losses, metrics

from hpctrain.checkpoint import folder
from hpctrain.checkpoint.verify import verify
from hpctrain.cli import main

SCRIPT = """
import dataclasses, resource, shutil, signal, time
import torch
from hpctrain import shard_entries
from hpctrain.checkpoint import shards
from hpctrain.train.trainer import Trainer
shard_entries.LEAST = 1  # every replica saves a part

train('run.name=whole', 'checkpoint.keep=3')

# damaged: the newest one, in one bit
if rank == 0:
    shutil.copytree(runs / 'whole', runs / 'damaged', symlinks=True)
    file = runs / 'damaged/checkpoints/step-12/ranks-00000/rank-00001.h5'
    content = bytearray(file.read_bytes())
    content[100] ^= 16  # beside the numbers
    file.write_bytes(content)
barrier()
train('run.name=damaged', 'checkpoint.keep=3', '--resume')
train('run.name=damaged', '--resume')

# signals: twice to one rank in the middle of a save, then TERM to the other in a step
write = shards.write
def warned(*a):
    for _ in range(2 * rank):
        os.kill(os.getpid(), signal.SIGUSR1)
    return write(*a)
shards.write = warned
train('run.name=signals')
shards.write = write
step = Trainer.forward_backward
at_step(3, lambda *_: rank == 0 and os.kill(os.getpid(), signal.SIGTERM))
train('run.name=signals', '--resume')
Trainer.forward_backward = step
train('run.name=signals', 'run.sample=0', '--resume')

# the clock; asynchronous saves
train('run.name=clock', 'run.max_seconds=0.001', 'run.checkpoint_every=0')
train('run.name=clock', 'checkpoint.background=true', '--resume')

# one rank's disk is full
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
rank and resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
train('run.name=full')
train('run.name=full-stop', 'checkpoint.on_failure=stop')
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

# one rank is slow to save
shards.write = lambda *a: (time.sleep(rank), write(*a))[1]
train('run.name=slow', 'run.checkpoint_every=12', 'comm.watchdog=60')
shards.write = write

# not a number, on one rank
def poison(trainer, batches):
    return rank and [dataclasses.replace(batch, scale=float('nan')) for batch in batches]
for policy in ('skip', 'rollback', 'stop'):
    at_step(5, poison)
    train(f'run.name=nan-{policy}', f'sanity.nonfinite={policy}')
    Trainer.forward_backward = step
at_step(2, poison)
train('run.name=nan-early', 'sanity.nonfinite=rollback')
Trainer.forward_backward = step

# a spike
at_step(40, lambda _, batches: [dataclasses.replace(batch, scale=9 * batch.scale) for batch in batches])
train('run.name=spike', 'run.steps=42', 'sanity.spike_factor=3', 'run.checkpoint_every=0')
Trainer.forward_backward = step

# a weight of one rank, in one bit
def flip(trainer, _):
    if rank:
        trainer.model.blocks['1'].mlp.up.weight.data.view(torch.int32)[0, 0] ^= 1 << 20
at_step(5, flip)
train('run.name=bit', 'sanity.check_every=7')
Trainer.forward_backward = step

# every collective checked, with a weight's gradients over two pipeline stages as well
train('run.name=checked', 'comm.check=true', 'run.checkpoint_every=6')
train('run.name=checked', 'comm.check=true', 'grid.data=1', 'grid.pipeline=2', 'run.steps=13', '--resume')

# another training
train('run.name=whole', 'model.width=16', 'train.batch=2', 'train.optimizer=sgd', '--resume')
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """(runs, {words of a job: its status}, {words of a job: its output})."""
    home = tmp_path_factory.mktemp("in_turn")
    job = begin_job(home, *command(home, write_text(home), SCRIPT, 2))
    output = job.wait(220).output
    parts = output.split("=== status ")
    assert len(parts) > 1, output
    ends = [part.split("\n", 1)[0].split(" ", 1) for part in parts[1:]]
    return home / "runs", {name: int(status) for status, name in ends}, dict(zip((name for _, name in ends), parts))


def test_a_damaged_checkpoint(told):
    """Said loudly; the one before it is used. A requeued job that had finished ends at once."""
    runs, status, output = told
    said = output["run.name=damaged checkpoint.keep=3 --resume"]
    damaged = runs / "damaged/checkpoints"
    reason = f"{damaged}/step-12/ranks-00000/rank-00001.h5 does not have the checksum in the manifest"
    assert f"WARNING: checkpoint step-12 is not used: {reason}" in said
    assert "resumed after step 9" in said
    assert status["run.name=damaged checkpoint.keep=3 --resume"] == 0
    assert losses(runs / "damaged") == losses(runs / "whole")
    assert folder.steps(damaged) == [12, 9, 6]
    assert (damaged / "step-12.bad").exists()
    assert os.readlink(damaged / "latest") == "step-12"
    assert status["run.name=damaged --resume"] == 0
    assert "resumed after step 12" in output["run.name=damaged --resume"]


def test_signals(told):
    """Each time all ranks save after the same step, once, and the end is the same to the bit."""
    runs, status, output = told
    names = [f"run.name=signals{more}" for more in ("", " --resume", " run.sample=0 --resume")]
    assert [status[name] for name in names] == [85, 85, 0]
    first, second, third = (output[name] for name in names)
    assert first.count("stopped by SIGUSR1 after step 4; saved, go on with --resume") == 1
    assert "resumed after step 4" in second
    assert second.count("stopped by SIGTERM after step 7; saved, go on with --resume") == 1
    assert "resumed after step 7" in third
    assert losses(runs / "signals") == losses(runs / "whole")
    assert folder.steps(runs / "signals/checkpoints") == [12, 9]


def test_the_clock(told):
    runs, status, output = told
    assert status["run.name=clock run.max_seconds=0.001 run.checkpoint_every=0"] == 85
    assert (
        "stopped by run.max_seconds after step 1;"
        in output["run.name=clock run.max_seconds=0.001 run.checkpoint_every=0"]
    )
    assert status["run.name=clock checkpoint.background=true --resume"] == 0
    assert losses(runs / "clock") == losses(runs / "whole")


def test_background_saves_say_what_they_cost(told):
    runs, *_ = told
    assert folder.steps(runs / "clock/checkpoints")[0] == 12
    stalls = {
        record["step"]: record["checkpoint_seconds"]
        for record in metrics(runs / "clock")
        if "checkpoint_seconds" in record
    }
    assert stalls
    assert all(0 < seconds < 5 for seconds in stalls.values())
    for path in folder.steps(runs / "clock/checkpoints"):
        verify(folder.place(runs / "clock/checkpoints", path))


def test_a_full_disk_on_one_rank(told):
    runs, status, output = told
    assert status["run.name=full"] == 0
    for step in (3, 6, 9, 12):
        assert f"WARNING: no checkpoint of step {step}: rank 1: [Errno 27] File too large" in output["run.name=full"]
    assert losses(runs / "full") == losses(runs / "whole")
    assert list((runs / "full/checkpoints").iterdir()) == []
    words = "run.name=full-stop checkpoint.on_failure=stop"
    assert status[words] == 1
    assert output[words].count("hpctrain: error: no checkpoint of step 3: rank 1: [Errno 27] File too large") == 1


def test_a_slow_rank_is_waited_for(told):
    runs, status, _ = told
    assert status["run.name=slow run.checkpoint_every=12 comm.watchdog=60"] == 0
    assert folder.steps(runs / "slow/checkpoints") == [12]


def test_nan_on_one_rank(told):
    """All ranks leave the step out; or all go back, and on with the data after it; or all stop."""
    runs, status, output = told
    words = "run.name=nan-skip sanity.nonfinite=skip"
    assert status[words] == 0
    assert output[words].count("WARNING: step 5 is skipped: loss nan") == 1
    records = metrics(runs / "nan-skip")
    assert [r["step"] for r in records if "skipped" in r] == [5]
    assert records[4]["loss"] is None
    words = "run.name=nan-rollback sanity.nonfinite=rollback"
    assert status[words] == 0
    assert "back to step 3, and on with the data after it" in output[words]
    records = losses(runs / "nan-rollback")
    whole = losses(runs / "whole")
    assert None not in records
    assert records[:3] == whole[:3]
    assert records[3] != whole[3]
    words = "run.name=nan-stop sanity.nonfinite=stop"
    assert status[words] == 1
    assert "hpctrain: error: step 5: loss nan and gradient norm nan are not both finite; learning rate" in output[words]
    assert folder.steps(runs / "nan-stop/checkpoints") == [3]
    words = "run.name=nan-early sanity.nonfinite=rollback"
    assert status[words] == 1
    assert "there is no checkpoint to go back to" in output[words]


def test_a_spike(told):
    runs, status, output = told
    (words,) = (words for words in status if "spike" in words)
    assert status[words] == 0
    assert "WARNING: step 40 is skipped: loss " in output[words]
    assert [r["step"] for r in metrics(runs / "spike") if "skipped" in r] == [40]


def test_a_weight_that_differs_by_a_bit(told):
    """Found before the next checkpoint, which would have kept it."""
    runs, status, output = told
    assert status["run.name=bit sanity.check_every=7"] == 1
    assert (
        "step 6: blocks.1.mlp.up.weight differs between rank 0 and rank 1"
        in output["run.name=bit sanity.check_every=7"]
    )
    assert folder.steps(runs / "bit/checkpoints") == [3]


def test_the_command(told, tmp_path, capsys):
    """`hpctrain checkpoint` lists and verifies, naming the file that is wrong, and exports what the run exported."""
    runs, *_ = told
    run = shutil.copytree(runs / "whole", tmp_path / "run", symlinks=True)
    assert main(["checkpoint", "ls", str(run)]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in listed] == ["6", "9", "12"]
    assert all("2 files" in line and "replica=2 ring=1 pipeline=1" in line for line in listed)
    assert main(["checkpoint", "verify", str(run)]) == 0
    assert capsys.readouterr().out.count("as written") == 3
    assert main(["checkpoint", "export", str(run), "-o", str(tmp_path / "out")]) == 0
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (run / "model", tmp_path / "out"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert (run / "model/config.json").read_text() == (tmp_path / "out/config.json").read_text()

    (run / "checkpoints/step-9/notes").write_text("not of it")
    os.truncate(run / "checkpoints/step-12/ranks-00000/rank-00000.h5", 1000)
    (run / "checkpoints/step-6/manifest.sha256").unlink()
    capsys.readouterr()
    assert main(["checkpoint", "verify", str(run)]) == 1
    told = capsys.readouterr().out.splitlines()
    for line, name in zip(
        told, ("step-6/manifest.sha256", "step-9/notes", "step-12/ranks-00000/rank-00000.h5"), strict=True
    ):
        assert "BAD" in line
        assert name in line
    assert main(["checkpoint", "ls", str(run)]) == 1
    assert main(["checkpoint", "export", str(run), "-o", str(tmp_path / "none")]) == 1
    assert main(["checkpoint", "verify", str(run), "--step", "7"]) == 2
    assert main(["checkpoint", "verify", str(tmp_path / "nowhere")]) == 2


def test_checked_mode(told):
    """The same bits; nothing differs, on another grid neither."""
    runs, status, output = told
    assert status["run.name=checked comm.check=true run.checkpoint_every=6"] == 0
    assert losses(runs / "checked")[:12] == losses(runs / "whole")[:12]
    (words,) = (words for words in status if "run.steps=13" in words)
    assert status[words] == 0
    assert "resumed after step 12" in output[words]


def test_another_training_is_refused(told):
    """And leaves the run as it was."""
    runs, status, output = told
    assert "width = 8\n" in (runs / "whole/config.toml").read_text()
    (words,) = (words for words in status if "model.width" in words)
    assert status[words] == 2
    changed = "model.width = 16, was 8; train.batch = 2, was 4; train.optimizer = sgd, was adamw"
    assert f"step-12 is of another training: {changed}." in output[words]
