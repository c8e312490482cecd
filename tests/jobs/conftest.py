"""Small training jobs."""

import os

import pytest
from checkout import copy
from cluster import ended, jobs, sbatch, shell, slurm, small
from running import SMALL, python, start, text

__all__ = ["ended", "jobs", "python", "sbatch", "shell", "slurm", "small", "start", "text", "train"]


@pytest.fixture(scope="session")
def no_cluster(tmp_path_factory):
    """A configuration at which Slurm's programs give up at once; where there is no file they wait for it, a minute."""
    path = tmp_path_factory.mktemp("no-cluster") / "slurm.conf"
    path.touch()
    return str(path)


@pytest.fixture(autouse=True)
def no_cluster_around(monkeypatch, no_cluster):
    """The login node of a cluster is no place for a study. The cluster of the tests has a SLURM_CONF of its own."""
    if "SLURM_JOB_ID" not in os.environ:
        monkeypatch.setenv("SLURM_CONF", no_cluster)


@pytest.fixture(scope="session")
def warm_checkout(tmp_path_factory):
    """A copy of the checkout whose `hpctrain` is warm, for all tests together."""
    return copy(tmp_path_factory.mktemp("checkout") / "copy", warm=True)


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
