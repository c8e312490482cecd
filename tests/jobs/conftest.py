"""Small training jobs."""

import os

import pytest
from cluster import ended, sbatch, shell, slurm, small
from running import SMALL, python, start, text

__all__ = ["ended", "python", "sbatch", "shell", "slurm", "small", "start", "text", "train"]


@pytest.fixture(autouse=True)
def no_cluster_around(monkeypatch):
    """The login node of a cluster is no place for a study. The cluster of the tests has a SLURM_CONF of its own."""
    if "SLURM_JOB_ID" not in os.environ:
        monkeypatch.setenv("SLURM_CONF", "/nowhere/slurm.conf")


@pytest.fixture
def train(start, tmp_path, text):
    """train(ranks, override, ...) begins a small training job, its runs in the test's folder."""

    def begin(ranks, *overrides, program=("hpctrain",), config=None, cold=False):
        if config is not None:
            return start(ranks, *program, "train", str(config), *overrides, cold=cold)
        config = tmp_path / "config.toml"
        config.write_text(f'[run]\nout = "{tmp_path}/runs"\n[data]\ntext = ["{text}"]\n')
        return start(ranks, *program, "train", str(config), *SMALL, *overrides, cold=cold)

    return begin
