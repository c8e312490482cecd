"""The loop of a job: what it does when a step is bad, a disk is full or checkpoints are gone, and before it stops."""

import contextlib
import errno
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpctrain.config import load_config
from hpctrain.train import finishing, loop
from hpctrain.train.progress import Progress
from hpctrain.train.run_folder import RunFolder
from hpctrain.train.sanity import Sanity, Stopped
from hpctrain.train.session import Position


@pytest.fixture
def config(tmp_path):
    return load_config(overrides=[f"run.out={tmp_path}", "run.name=a", "sanity.nonfinite=rollback"])


@pytest.fixture
def full_disk(monkeypatch):
    """Within the context that it makes, no file can be written."""

    @contextlib.contextmanager
    def full():
        def fail(*_, **__):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as disk:
            disk.setattr(Path, "write_text", fail)
            yield

    return full


def steps_of(folder):
    return [json.loads(line)["step"] for line in (folder.path / "metrics.jsonl").read_text().splitlines()]


def session_of(config, folder, **parts):
    return SimpleNamespace(
        config=config, folder=folder, grid=SimpleNamespace(rank=0), sanity=Sanity(0.0),
        checkpointer=SimpleNamespace(saved=1, finish=lambda: None), **parts,
    )  # fmt: skip


def test_a_full_disk_at_a_rollback(config, monkeypatch, full_disk):
    """Training goes back; the metrics follow with a later step."""
    folder = RunFolder(config)
    folder.begin(0)
    for step in (1, 2, 3):
        folder.log({"step": step})
    session = session_of(config, folder, position=Position(3, 3))

    def restore(session):
        session.position = Position(1, 1)
        return True

    monkeypatch.setattr(loop, "restore", restore)
    with full_disk():
        assert not loop.leave_out(session, session.sanity.bad(2, math.nan, 1.0), 0.1)
    assert session.position == Position(1, 4)
    folder.log({"step": 2})
    assert steps_of(folder) == [1, 2]


def test_a_full_disk_at_the_validation_that_a_stop_left(config, full_disk):
    folder = RunFolder(config)
    folder.begin(0)
    folder.log({"step": 1})
    session = session_of(
        config, folder, position=Position(1, 1, {"step": 1}),
        trainer=SimpleNamespace(evaluate=lambda *_: 2.0),
        agreement=SimpleNamespace(stop=0, stop_in_validation=lambda: None),
    )  # fmt: skip
    with full_disk():
        loop.evaluate_what_a_stop_left(session, [])
    folder.close()
    assert json.loads((folder.path / "metrics.jsonl").read_text()) == {"step": 1, "val_loss": 2.0}


def test_a_full_disk_at_the_export(config, monkeypatch):
    """The job ends in one line that says where the trained weights are."""

    def export(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(finishing, "export", export)
    strategy = SimpleNamespace(full_weights=contextlib.nullcontext)
    tokens = SimpleNamespace(end_of_document=0)
    session = session_of(
        config, None, data=SimpleNamespace(tokens=tokens), trainer=SimpleNamespace(strategy=strategy), spec=None,
        model=None,
    )  # fmt: skip
    session.checkpointer.describe_newest = lambda: "the newest checkpoint is step-9"
    with pytest.raises(Stopped, match="the weights are not exported: .*No space left.*; the newest .* is step-9"):
        finishing.finish(session)


def test_a_validation_that_is_not_finite(config, capsys):
    """Is null in the metrics, as JSON has no NaN, and words elsewhere."""
    folder = RunFolder(config)
    folder.begin(0)
    record = {"step": 1, "loss": 1.0, "lr": 0.1, "tokens_per_second": 1.0}
    trainer = SimpleNamespace(evaluate=lambda *_: math.nan)
    agreement = SimpleNamespace(stop_in_validation=lambda: None)
    assert loop.evaluate(session_of(config, folder, trainer=trainer, agreement=agreement), record, [])
    folder.log(record)
    folder.close()
    folder.plot()
    assert json.loads((folder.path / "metrics.jsonl").read_text())["val_loss"] is None
    Progress(10).update(record)
    assert capsys.readouterr().out.endswith("loss 1.0000  1 tokens/s  validation not finite\n")


def test_checkpoints_that_vanished_before_a_rollback(config):
    """As from a scratch disk that is purged: the weights are those of the steps that were taken."""
    folder = RunFolder(config)
    folder.begin(0)
    folder.log({"step": 1})
    session = session_of(config, folder, state=None, data=None, position=Position(1, 1))
    session.checkpointer.clean, session.checkpointer.resume = lambda: None, lambda *_: None
    with pytest.raises(Stopped, match="step 2: loss nan .*; there is no checkpoint to go back to"):
        loop.leave_out(session, session.sanity.bad(2, math.nan, 1.0), 0.1)
    assert steps_of(folder) == [1]


def test_ranks_are_compared_before_a_stop_saves(config, monkeypatch):
    """Jobs that are chained by their time limit save by stops alone: the next one would go on with damaged weights."""
    done = []

    def step(session):
        session.position.step += 1
        session.agreement.stop = 1
        return {}

    stubs = {
        "evaluate_what_a_stop_left": lambda *_: None, "train_step": step, "tell_totals": id,
        "compare_ranks": lambda _: done.append("compared"), "save_when_due": lambda _: done.append("saved"),
    }  # fmt: skip
    for name, stub in stubs.items():
        monkeypatch.setattr(loop, name, stub)
    agreement = SimpleNamespace(stop=0, save_due=lambda step: agreement.stop, finish=lambda: None)
    session = session_of(
        config, None, position=Position(), agreement=agreement, schedule=None, device=None,
        data=SimpleNamespace(samples=SimpleNamespace(validation_batches=lambda *_: [])),
    )  # fmt: skip
    assert loop.take_steps(session) == "run.max_seconds"
    assert done == ["compared", "saved"]
