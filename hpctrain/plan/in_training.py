"""What operations and exchanges take among all others of a training step, where caches, memory and the other ranks are
not as beside one operation again and again: from steps of small models, which `hpctrain.scale.at_once` measures."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hpctrain.config import load_config
from hpctrain.plan.describe import machine_toml
from hpctrain.plan.estimator import Estimate, Estimator
from hpctrain.plan.job import read
from hpctrain.plan.machine import Machine

# Of sequences of a replica, in as many microbatches: many rows for the weights; few, so that reading weights is a third
# of the time; and few in one microbatch, so that the update is.
JOBS = (
    (8, 2, "model.layers=2", "model.width=256", "model.context=256"),
    (4, 4, "model.layers=3", "model.width=640", "model.context=32"),
    (1, 1, "model.layers=3", "model.width=640", "model.context=32"),
)
COMMON = ("model.heads=8", "model.vocabulary=320", "run.checkpoint_minutes=0", "sanity.check_every=0",
          "comm.watchdog=0")  # fmt: skip
MOST = 8  # ranks that divide a model


def jobs(ranks: int) -> list[list[str]]:
    """The settings of each on so many ranks, replicas of as many as divide their number, up to MOST; of one it is the
    whole model. These lie along x, and then along y, where they have more to exchange."""
    size = max(size for size in range(1, MOST + 1) if ranks % size == 0)
    replicas = ranks // size
    return [
        [
            *model, f"train.batch={sequences * replicas}", f"train.microbatches={microbatches}", *COMMON,
            f"grid.tensor={box}", f"grid.data={replicas}",
        ]
        for box in ([[size, 1, 1], [1, size, 1]] if size > 1 else [[1, 1, 1]])
        for sequences, microbatches, *model in JOBS
    ]  # fmt: skip


def in_training(found: Sequence[dict]) -> list[dict]:
    """The figures of `measure.measure` as they are in a step, by each one's `alone` and `together`, seconds of a step
    of `jobs(1)` where each rank trains a model of its own, and of `jobs(ranks)`.

    By the first, every operation of the forward and backward pass takes `slower` times as long, weights that no cache
    holds are read at `cold` B/s, and the optimizer's state at `state` B/s:
    seconds = slower × operations + bytes of weights / cold + bytes of the update / state + reading.
    By the second, chance delays ranks, which wait for one another: `Device.delay`.
    """
    found = [each | {"delay": 0.0} for each in found]
    found = [each | _slower(each, machine) for each, machine in zip(found, _machines(found))]
    return [each | _delay(each, machine) for each, machine in zip(found, _machines(found))]


def _machines(found: Sequence[dict]) -> list[Machine]:
    """For each number of ranks of a node."""
    machine = Machine.of_tables({"name": "here", **tomllib.loads(machine_toml(found, "", ""))})
    return [machine.crowded(each["ranks_of_a_node"]) for each in found]


def _predicted(overrides: Sequence[str], machine: Machine, **figures: float) -> Estimate:
    """A step with these figures of the device."""
    job, choice = read(load_config(overrides=overrides))
    return Estimator(job, replace(machine, device=replace(machine.device, **figures))).estimate(choice)


def _slower(found: dict, machine: Machine) -> dict:
    equations, rest = [], []
    for job, taken in zip(jobs(1), found["alone"], strict=True):
        warm, cold = (_predicted(job, machine, cache=0.0, cold_bandwidth=rate).parts for rate in (0.0, 1.0))
        equations.append((warm["compute"], cold["compute"] - warm["compute"], warm["optimizer"]))
        rest.append(taken - warm["reading"])
    slower, byte, update = _least(equations, rest)
    if not slower:
        raise ValueError(f"steps of {found['ranks']} ranks took no longer than an update: measure when nobody disturbs")
    return {
        "slower": slower,
        "cold": 1 / byte if byte else 0.0,
        "state": found["state"] / update if update else found["state"],
        "products": {
            name: [(m, k, n, slower * taken) for m, k, n, taken in rows] for name, rows in found["products"].items()
        },
        "launch": slower * found["launch"],
        "attention": [[(width, rate / slower) for width, rate in rows] for rows in found["attention"]],
        **{name: found[name] / slower for name in ("elements", "norms", "activations")},
    }


def _delay(found: dict, machine: Machine) -> dict:
    equations, rest = [], []
    for job, taken in zip(jobs(found["ranks"]), found["together"], strict=True):
        none, one = (_predicted(job, machine, delay=delay).seconds for delay in (0.0, 1.0))
        equations.append((one / none - 1,))  # as parts of a step: a long one tells no more than a short one
        rest.append(taken / none - 1)
    if found["ranks"] == 1:
        return {}
    (delay,) = _least(equations, rest)
    return {"delay": delay}


def _least(equations: Sequence[Sequence[float]], rest: Sequence[float]) -> list[float]:
    """The unknowns, none of them below 0, by least squares."""
    from scipy.optimize import nnls

    table = np.array(equations)
    scale = table.max(0)  # bytes and seconds in one table
    return [float(each) for each in nnls(table / scale, np.array(rest))[0] / scale]
