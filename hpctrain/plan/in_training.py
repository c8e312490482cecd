"""What operations take among all others of a training step, where caches and memory are not those of one that is
repeated: from the steps of two small models, which `hpctrain.scale.at_once` measures."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hpctrain.config import load_config
from hpctrain.plan.describe import machine_toml
from hpctrain.plan.estimator import Estimator
from hpctrain.plan.job import read
from hpctrain.plan.machine import Machine

# One with many rows for its weights, one with few: of the second, reading weights is a third of the time.
JOBS = (
    ("model.layers=2", "model.width=256", "model.heads=4", "model.context=256", "train.batch=8"),
    ("model.layers=3", "model.width=640", "model.heads=8", "model.context=32", "train.batch=8"),
)
SLOWER = "elements", "norms", "activations"  # B/s of operations
OPTIONS = ("model.vocabulary=320", "train.microbatches=2", "run.checkpoint_minutes=0", "sanity.check_every=0",
           "comm.watchdog=0")  # fmt: skip


def in_training(found: Sequence[dict]) -> list[dict]:
    """The figures of `measure.measure` as they are in a step: every operation of the forward and backward pass takes
    `slower` times as long, and weights that no cache holds are read at `cold` B/s.

    Both from each one's `steps`, seconds of a step of each of JOBS on so many ranks, each of which trains a model of
    its own: two equations, seconds = slower × operations + bytes of cold weights / cold + update + reading.
    """
    plain = Machine.of_tables({"name": "as they are", **tomllib.loads(machine_toml(found, "", ""))})
    return [_slower(each, plain.crowded(each["ranks"])) for each in found]


def _slower(found: dict, crowded: Machine) -> dict:
    rows, rest = [], []
    for overrides, taken in zip(JOBS, found["steps"]):
        job, choice = read(load_config(overrides=[*overrides, *OPTIONS]))
        warm, cold = (
            Estimator(job, replace(crowded, device=replace(crowded.device, cold_bandwidth=rate, cache=0.0)))
            .estimate(choice)
            .parts
            for rate in (0.0, 1.0)
        )
        rows.append((warm["compute"], cold["compute"] - warm["compute"]))
        rest.append(taken - warm["optimizer"] - warm["reading"])
    slower, byte = np.linalg.solve(np.array(rows), np.array(rest))
    if slower <= 0 or byte <= 0:  # reading weights costs nothing, or the clock was disturbed
        operations = np.array([row[0] for row in rows])
        slower, byte = float(operations @ rest / (operations @ operations)), 0.0
    return found | {
        "slower": float(slower),
        "cold": 1 / float(byte) if byte else 0.0,
        "products": {
            name: [(m, k, n, slower * taken) for m, k, n, taken in each] for name, each in found["products"].items()
        },
        "launch": slower * found["launch"],
        "attention": [rate / slower for rate in found["attention"]],
        **{name: found[name] / slower for name in SLOWER},
    }
