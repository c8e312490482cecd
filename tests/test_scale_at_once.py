"""Ranks that train models of their own at the same time, and one together."""

import json
import time
from types import SimpleNamespace

import pytest
import torch

from hpctrain.plan.in_training import JOBS, jobs

SMALL = ["model.layers=1", "model.width=16", "model.heads=2", "model.context=8", "train.batch=2",
         "train.microbatches=1"]  # fmt: skip


@pytest.mark.mpi
@pytest.mark.ranks(1, 2)
def test_every_rank_trains_its_own_and_all_train_one(world, tmp_path, monkeypatch):
    from hpctrain.scale import at_once

    steps, train_step = [], at_once.train_step
    monkeypatch.setattr(at_once, "train_step", lambda session: steps.append(session.grid.size) or train_step(session))
    monkeypatch.setattr(at_once, "of_a_core", lambda grid: 1.0)
    folder = world.bcast(tmp_path)
    text = folder / "text.txt"
    if world.rank == 0:
        text.write_text("Every rank has a model of its own, and all have one.\n" * 99)
    world.Barrier()

    def small(ranks):
        return [[*job, *SMALL, f"data.text={json.dumps([str(text)])}"] for job in jobs(ranks)]

    count = len(JOBS) * (at_once.WARM_UP + 2)
    alone = at_once.alone(small(1), 2, folder, world)
    assert steps == [1] * count
    together = at_once.together(small(world.size), 2, folder, world)
    twice = 2 if world.size > 1 else 1  # along x, and along y
    assert steps == [1] * count + [world.size] * count * twice
    assert min(alone + together) > 0
    assert world.allgather((alone, together)) == [(alone, together)] * world.size
    monkeypatch.setattr(at_once, "of_a_core", lambda grid: 1e6)  # ranks that share a core take the seconds of all
    again = folder / "again"
    again.mkdir(exist_ok=True)
    assert at_once.alone(small(1)[:1], 2, again, world)[0] > 1e3 * alone[0]
    assert at_once.together(small(world.size)[:1], 2, again, world)[0] < 1e3 * together[0]


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_who_trains_together_waits(world, monkeypatch, tmp_path):
    """Which counts: by the clock, where a rank that trains alone counts what its core does for it."""
    from hpctrain.scale import at_once

    made = SimpleNamespace(device=torch.device("cpu"), grid=SimpleNamespace(free=lambda: None))
    monkeypatch.setattr(at_once, "build", lambda config, ranks: made)
    monkeypatch.setattr(at_once, "train_step", lambda session: time.sleep(0.02))
    monkeypatch.setattr(at_once, "of_a_core", lambda grid: 1.0)
    folder = world.bcast(tmp_path)
    assert at_once.alone(jobs(1)[:1], 2, folder, world)[0] < 0.01
    assert at_once.together(jobs(2)[:1], 2, folder, world)[0] > 0.02


def test_jobs_tell_products_weights_and_updates_apart():
    """Many rows for the weights; few, and as many for the update; and few for both."""
    of_weights, of_update = [], []
    for sequences, microbatches, *model in JOBS:
        of = {name: int(value) for name, value in (setting.split("=") for setting in model)}
        of_update.append(sequences * of["model.context"] / (of["model.layers"] * of["model.width"] ** 2))
        of_weights.append(of_update[-1] / microbatches)
    assert of_weights[0] > 10 * of_weights[1] == 10 * of_weights[2]
    assert of_update[0] > 10 * of_update[1] > 30 * of_update[2]
