"""All that a search may propose is a configuration that trains, whatever is asked for besides."""

from types import SimpleNamespace

import pytest

from hpctrain.choices import RECOMPUTE
from hpctrain.config import load_config
from hpctrain.pipeline import NAMES
from hpctrain.plan import Machine, planned, search
from hpctrain.plan import job as jobs
from hpctrain.plan.estimator import Estimator
from hpctrain.plan.search import Search
from hpctrain.plan.space import SYNCHRONOUS

CPU = Machine.load("cpu-cluster")
JOB = ["model.layers=6", "model.width=64", "model.heads=4", "train.batch=8", "model.context=32", "model.vocabulary=64"]
APART = ["train.clip=0", "model.tied=false"]  # as schedules that delay updates ask for
MIXED = ["model.kind=mixtral", "model.experts=2", "model.aux_loss=0.1"]
BY_STEP = [*MIXED, "model.aux_scope=step"]


def tried(*settings, ranks=4):
    """The configuration, and all choices that a search on so many ranks has."""
    config = load_config(overrides=[*JOB, *settings])
    job, given = jobs.read(config)
    everything = list(Search(Estimator(job, CPU), given, ranks).everything())
    assert everything
    return config, everything


ASKED = {
    **{f"{name} alone": [f"pipeline.schedule={name}", "grid.pipeline=2", *APART] for name in NAMES},
    "zb-v cut": ["pipeline.schedule=zb-v", "grid.pipeline=2", "pipeline.partition=[2,2,1,1]"],
    "dualpipev cut": ["pipeline.schedule=dualpipev", "grid.pipeline=2", "pipeline.partition=[2,2,1,1]"],
    "interleaved by 3": ["pipeline.schedule=interleaved", "pipeline.virtual_stages=3", "grid.pipeline=2"],
    "servers": ["data_parallel.method=parameter_server", "grid.data=2"],
    "servers, stale": ["data_parallel.method=parameter_server", "data_parallel.staleness=1", "grid.data=2"],
    "local": ["data_parallel.method=local_sgd", "grid.data=2"],
    "experts": MIXED,
    "experts by step": [*BY_STEP, "pipeline.schedule=gpipe", "grid.pipeline=2", "train.microbatches=2"],
    "experts by step in one": [*BY_STEP, "train.microbatches=1"],
    "experts by step, cut": [*BY_STEP, "train.microbatches=1", "pipeline.partition=[4,2]", "grid.pipeline=2"],
}


@pytest.mark.parametrize("asked", ASKED)
def test_every_choice_is_allowed(asked):
    config, everything = tried(*ASKED[asked])
    for choice in everything:
        planned(config, SimpleNamespace(settings=choice.settings))
    assert search(config, 4, CPU, top=1)[0].fits


def test_nothing_is_left_out_that_is_allowed():
    schedules = {choice.schedule for choice in tried()[1]}
    assert schedules == {*SYNCHRONOUS}
    _, delayed = tried("pipeline.schedule=pipedream", "grid.pipeline=2", *APART)
    assert {(choice.data, choice.pipeline) for choice in delayed} >= {(2, 2), (1, 4)}
    assert {choice.recompute for choice in delayed} == {"none", "attention"}
    _, paired = tried("pipeline.schedule=chimera", "grid.pipeline=2")
    assert {choice.pipeline for choice in paired} == {2, 4}
    assert {choice.method for choice in paired} == {"ddp", "zero1", "zero2", "zero3"}
    assert {choice.recompute for choice in paired} == {*RECOMPUTE}
    _, by_step = tried(*BY_STEP, "pipeline.schedule=gpipe", "grid.pipeline=2", "train.microbatches=2")
    assert {choice.schedule for choice in by_step if choice.microbatches > 1} == {"gpipe"}
    assert {choice.schedule for choice in by_step if choice.microbatches == 1} == {"gpipe", *SYNCHRONOUS}


def test_gpipe_is_kept():
    config = load_config(overrides=[*JOB, "pipeline.schedule=gpipe", "grid.pipeline=2", "train.microbatches=4"])
    (best,) = search(config, 4, CPU, top=1, keep=("pipeline.schedule", "grid.pipeline"))
    assert (best.settings["pipeline.schedule"], best.settings["grid.pipeline"]) == ("gpipe", 2)
