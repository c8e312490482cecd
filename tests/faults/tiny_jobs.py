"""A tiny job: two ranks, a model of width 8; what it wrote of its losses."""

import json
import sys
from pathlib import Path

TINY = [
    "model.layers=2", "model.width=8", "model.heads=2", "model.context=8", "model.dropout=0.1", "train.batch=4",
    "train.warmup=2", "run.steps=12", "run.eval_batches=1", "run.checkpoint_every=3", "checkpoint.background=false",
]  # fmt: skip


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder):
    """Losses by step, each step once; the validation loss last."""
    records = metrics(folder)
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [record["loss"] for record in records] + [records[-1].get("val_loss")]


def command(folder, text, script, ranks):
    """(ranks, word, ...) of a job of these statements; see `faulty.py`. Its runs are in the folder."""
    config = folder / "config.toml"
    config.write_text(f'[run]\nout = "{folder}/runs"\n[data]\npath = "{folder}/data.h5"\ntext = ["{text}"]\n')
    faulty = str(Path(__file__).with_name("faulty.py"))
    return ranks, sys.executable, faulty, script, str(config), f"grid.data={ranks}", *TINY
