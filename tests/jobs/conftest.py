"""Small training jobs."""

import pytest
from running import ROOT, Ended, Job, python, start, text

__all__ = ["ROOT", "SMALL", "Ended", "Job", "python", "start", "text", "train"]

SMALL = [
    "model.layers=2", "model.width=12", "model.heads=3", "model.context=16", "train.batch=6", "train.microbatches=2",
    "train.warmup=2", "run.steps=3", "run.eval_batches=1",
]  # fmt: skip


@pytest.fixture
def train(start, tmp_path, text):
    """train(ranks, override, ...) begins a small training job, its runs in the test's folder."""

    def begin(ranks, *overrides, program=("hpctrain",), config=None):
        if config is not None:
            return start(ranks, *program, "train", str(config), *overrides)
        config = tmp_path / "config.toml"
        config.write_text(f'[run]\nout = "{tmp_path}/runs"\n[data]\ntext = ["{text}"]\n')
        return start(ranks, *program, "train", str(config), *SMALL, *overrides)

    return begin
