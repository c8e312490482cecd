"""Real jobs that are made to fail. Each is tiny: two ranks, a model of width 8."""

import json
from pathlib import Path

import pytest
from running import python, start, text

__all__ = ["losses", "metrics", "python", "start", "text", "tiny", "uninterrupted"]

TINY = [
    "model.layers=2", "model.width=8", "model.heads=2", "model.context=8", "model.dropout=0.1", "train.batch=4",
    "train.warmup=2", "run.steps=12", "run.eval_batches=1", "run.checkpoint_every=3", "checkpoint.background=false",
]  # fmt: skip


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.job)


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder):
    """Losses by step, each step once; the validation loss last."""
    records = metrics(folder)
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [record["loss"] for record in records] + [records[-1].get("val_loss")]


@pytest.fixture
def tiny(start, tmp_path, text, python):
    """tiny(ranks, override, ..., faults="...") begins a job, its runs in the test's folder; `faults` are statements
    that `faulty.py` carries out before training."""
    config = tmp_path / "config.toml"
    config.write_text(f'[run]\nout = "{tmp_path}/runs"\n[data]\npath = "{tmp_path}/data.h5"\ntext = ["{text}"]\n')
    faulty = str(Path(__file__).with_name("faulty.py"))

    def begin(ranks, *overrides, faults=""):
        return start(ranks, python, faulty, faults, "train", str(config), f"grid.data={ranks}", *TINY, *overrides)

    return begin


@pytest.fixture
def uninterrupted(tiny, tmp_path):
    """Losses of the tiny job on two ranks when nothing happens to it."""
    ended = tiny(2, "run.name=whole", "run.checkpoint_every=0").wait()
    assert ended.status == 0, ended.output
    return losses(tmp_path / "runs/whole")
