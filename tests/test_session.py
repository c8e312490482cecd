"""What is checked before a job's parts are built, and where its weights are from."""

import math
import shutil
import time
from types import SimpleNamespace

import pytest
from running import write_text
from trained_here import losses, trainer_in

from hpctrain.config import load_config
from hpctrain.train import session
from hpctrain.train.loop import take_steps
from hpctrain.train.session import build

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2)]


@pytest.mark.parametrize("resumes", [False, True])
def test_ranks_with_other_settings(world, resumes):
    """As mpirun -n 1 hpctrain train a.toml : -n 1 hpctrain train a.toml run.steps=3 starts them; on all ranks."""
    config = load_config(None, [f"run.steps={2 if resumes else 2 + world.rank}", "grid.data=2"])
    text = "--resume = 'must', and rank 0 with ''" if resumes else "run.steps = 3, and rank 0 with 2"
    with pytest.raises(ValueError, match=f"rank 1 was started with {text}; start all ranks alike"):
        build(config, world, "must" if resumes and world.rank else "")


MODEL = [
    "model.layers=1", "model.heads=2", "model.width=8", "model.context=16", "model.vocabulary=257", "train.batch=4",
    "run.eval_batches=1", "run.checkpoint_every=2", "grid.data=2", "data_parallel.method=zero1",
]  # fmt: skip


@pytest.mark.parametrize("seconds", [0, 60])
def test_the_watchdog_is_the_configuration_s(world, tmp_path, seconds):
    """And not that of scripts, which a trainer starts."""
    folder = world.bcast(tmp_path)
    if world.rank == 0:
        write_text(folder)
    world.Barrier()
    files = [f"data.text={folder}/text.txt", f"run.out={folder}"]
    config = load_config(None, [*MODEL, *files, f"comm.watchdog={seconds}"])
    watchdog = build(config, world).grid.transport.watchdog
    assert (watchdog.limit if watchdog else 0) == seconds


def test_an_overflow_after_a_rollback(world, tmp_path):
    """Which has waited for the save that was under way: nothing of that is left to be done."""
    folder = world.bcast(tmp_path)
    if world.rank == 0:
        write_text(folder)
    world.Barrier()
    found = ["precision.compute=fp16", "sanity.nonfinite=rollback", "run.steps=4", f"run.out={folder}"]
    job = build(load_config(None, [*MODEL, *found, f"data.text={folder}/text.txt"]), world)
    compute, losses = job.trainer.forward_backward, []

    def forward_backward(batch):
        loss, norm, overflow = compute(batch)
        losses.append(loss)
        if len(losses) == 3:
            while not job.checkpointer.phase_done:
                time.sleep(0.01)
            return math.nan, math.nan, False
        return loss, norm, overflow or len(losses) == 4

    job.trainer.forward_backward = forward_backward
    assert take_steps(job) == ""
    assert (job.position.step, job.checkpointer.saved, len(losses)) == (4, 4, 5)


def test_a_stop_in_a_step_that_overflows(world, tmp_path):
    """Is heeded there: it may take many such steps to a scale that fits, and the job is killed soon."""
    folder = world.bcast(tmp_path)
    if world.rank == 0:
        write_text(folder)
    world.Barrier()
    options = [*MODEL, "precision.compute=fp16", "run.steps=4", f"run.out={folder}", f"data.text={folder}/text.txt"]
    told = SimpleNamespace(code=2 * (world.rank == 1))
    job = build(load_config(None, options), world, interrupts=told)
    compute = job.trainer.forward_backward
    job.trainer.forward_backward = lambda batch: (compute(batch)[0], math.inf, True)
    assert take_steps(job) == "SIGUSR1"
    assert (job.position.step, job.checkpointer.saved) == (1, 1)


def test_a_resumed_run_needs_no_folder_that_it_once_started_from(world, tmp_path, capfd):
    """Its weights are a checkpoint's; begun anew it needs that folder."""
    train = trainer_in(world, tmp_path, MODEL)
    assert train("run.steps=1", "run.name=first", "run.seed=5") == 0
    init = train.folder / "init"
    if world.rank == 0:
        shutil.copytree(train.folder / "first/model", init)
    whole = [f"model.init={init}", "run.steps=4"]
    assert train(*whole, "run.name=whole") == 0
    assert train(*whole, "run.name=again") == 0
    if world.rank == 0:
        shutil.rmtree(init)
        (step,) = (train.folder / "again/checkpoints").glob("step-4")
        shutil.rmtree(step)
    world.Barrier()
    for resume in ("--resume", "--resume=auto"):
        assert train(*whole, "run.name=again", resume) == 0
        if world.rank == 0:
            assert losses(train.folder / "again") == losses(train.folder / "whole")
    capfd.readouterr()
    assert train(*whole, "run.name=again") == 2
    if world.rank == 0:
        assert "init holds no readable config.json" in capfd.readouterr().err
        assert not (train.folder / "again.1").exists()


def test_a_run_that_another_job_began_anew_meanwhile(world, tmp_path, monkeypatch, capfd):
    """Its checkpoints are gone: neither they nor model.init would give the weights."""
    monkeypatch.setattr(session, "goes_on", lambda folder, resume: True)
    assert trainer_in(world, tmp_path, MODEL)("run.name=taken", "--resume=auto") == 2
    if world.rank == 0:
        assert "taken anew while this one started; start this one again" in capfd.readouterr().err
