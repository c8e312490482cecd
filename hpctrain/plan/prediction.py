"""What a training step will cost, before it runs."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from hpctrain.config import Config
from hpctrain.config.checks import check
from hpctrain.pipeline.actions import FORWARD, flat
from hpctrain.plan import job as jobs
from hpctrain.plan import pipelines, stage_messages
from hpctrain.plan.estimator import Estimate, Estimator
from hpctrain.plan.job import Choice, Job
from hpctrain.plan.machine import Machine
from hpctrain.plan.traffic import step_traffic


@dataclass(frozen=True)
class Prediction:
    """Of one training step.

    Attributes:
        seconds, low, high: and the interval that the machine's errors give.
        memory_bytes: of the rank that needs the most; fits: whether a device has them.
        bytes: that the rank receives which receives the most, {axis: bytes}, as the ledger counts them; those of
            local SGD and of a parameter server with staleness are means over many steps.
        parts: seconds of the busiest rank: compute, data, tensor, sequence, expert (communication that nothing hides),
            bubble (with sums between ranks of a pipeline), optimizer, reading, stragglers; their sum is `seconds`.
        bound_by: the largest part.
        settings: {"section.key": value} that make the configuration this one.
    """

    seconds: float
    low: float
    high: float
    memory_bytes: float
    fits: bool
    bytes: dict[str, float]
    parts: dict[str, float]
    bound_by: str
    settings: dict[str, object]

    @property
    def overrides(self) -> list[str]:
        """`section.key=value` of the settings, none of them with a space."""
        plain = {name: value if isinstance(value, str) else json.dumps(value) for name, value in self.settings.items()}
        return [f"{name}={value.replace(' ', '')}" for name, value in plain.items()]

    def describe(self) -> str:
        """In a line."""
        return (
            f"{self.seconds:.4g} s a step ({self.low:.4g} to {self.high:.4g}), bound by {self.bound_by}, "
            f"{self.memory_bytes / 2**30:.2f} GiB a rank"
        )

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def predict(config: Config, machine: Machine | str) -> Prediction:
    """Predict a step of the configuration on its grid's ranks of the machine. Starts neither MPI nor torch.

    Raises:
        ValueError: for an unknown machine, figures that it lacks, and models whose costs no formula tells.
    """
    machine = Machine.load(machine) if isinstance(machine, str) else machine
    job, choice = jobs.read(config)
    return predicted(Estimator(job, machine.crowded(config.ranks)), choice)


def predicted(estimator: Estimator, choice: Choice, estimate: Estimate | None = None) -> Prediction:
    """The whole prediction of a choice."""
    estimate = estimate or estimator.estimate(choice)
    job, machine = estimator.job, estimator.machine
    off = machine.errors.relative
    # by default they are as many as ranks of the pipeline, of which the plan's may have others than the configuration
    slices = {"pipeline.slices": [*job.slices]} if job.slices else {}
    ranked = {name: part for name, part in estimate.parts.items() if name != "stragglers"}
    return Prediction(
        seconds=estimate.seconds,
        low=estimate.seconds * (1 - off),
        high=estimate.seconds * (1 + off),
        memory_bytes=estimate.memory,
        fits=estimate.memory <= machine.device.memory,
        bytes=received(job, choice),
        parts=estimate.parts,
        bound_by=max(ranked, key=ranked.__getitem__),
        settings=choice.settings | {"precision.compute": job.compute} | slices,
    )


def received(job: Job, choice: Choice) -> dict[str, float]:
    """Bytes of the rank that receives the most, {axis: bytes}."""
    last = choice.pipeline - 1
    alike = not (choice.boxes or choice.partition or job.costs.dense_layers)  # all ranks but the ends
    ranks = sorted({0, min(1, last), last}) if alike else range(last + 1)
    roles = (False, True) if job.servers else (False,)
    each = (received_by(job, choice, rank, serves) for rank in ranks for serves in roles)
    return max(each, key=lambda axes: sum(axes.values()))


def received_by(job: Job, choice: Choice, rank: int, serves: bool = False) -> dict[str, float]:
    """Bytes of a rank of the pipeline axis, which `serves` or works where there are parameter servers, {axis: bytes}:
    `step_traffic`, and what comes to it and what it sends back is re-partitioned between boxes."""
    schedule = pipelines.shape(
        choice.schedule, choice.pipeline, choice.microbatches, choice.virtual_stages, len(job.slices)
    ).schedule
    axes = step_traffic(
        job.costs, choice.at(rank).grid, job.batch, schedule, job.itemsize, rank, choice.algorithm, job.overlap,
        choice.partition or None, choice.method, choice.expert, job.reduce, job.comm, choice.expert_tensor,
        job.averaged, job.servers, serves, job.staleness, choice.recompute,
    )  # fmt: skip
    for action in flat(schedule.order[rank]) if choice.boxes and not serves else ():
        sender = schedule.placement.get((action.replica, action.stage - 1), rank)
        boxes = choice.boxes[sender], choice.boxes[rank]
        if action.kind == FORWARD and boxes[0] != boxes[1]:
            axes["tensor"] += job.itemsize * max(map(sum, stage_messages.lacked(job, choice, *boxes)))
    return axes


def planned(config: Config, prediction: Prediction) -> Config:
    """The configuration with the prediction's settings, checked."""
    sections: dict[str, Any] = {}  # each of a class of its own
    for name, value in prediction.settings.items():
        section, _, key = name.partition(".")
        sections[section] = dataclasses.replace(sections.get(section, getattr(config, section)), **{key: value})
    changed = dataclasses.replace(config, **sections)
    check(changed)
    return changed
