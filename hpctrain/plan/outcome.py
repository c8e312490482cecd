"""What a run took beside what its plan had said: seconds by part, bytes and memory."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpctrain.config import Config
from hpctrain.plan.learn import compare, of_last_job, table
from hpctrain.plan.machine import Machine
from hpctrain.plan.prediction import Prediction, predict

Both = tuple[float, float]  # predicted, measured


@dataclass(frozen=True)
class Outcome:
    """
    Attributes:
        machine: name of the machine that the prediction is for.
        seconds: of rank 0 by part, and "step" for all; see `learn.compare`.
        bytes: by axis, received in a step by the rank that receives the most.
        memory: bytes of the rank that needs the most, or None where ranks have not said.
    """

    machine: str
    prediction: Prediction
    seconds: dict[str, Both]
    bytes: dict[str, Both]
    memory: Both | None

    @property
    def wrong(self) -> list[str]:
        """What was not as predicted: a step outside of its interval, with the part that is furthest off; memory by
        more than a tenth; bytes by more than a hundredth."""
        found = []
        (_, step), low, high = self.seconds["step"], self.prediction.low, self.prediction.high
        if not low <= step <= high:
            parts = {name: measured - said for name, (said, measured) in self.seconds.items() if name != "step"}
            part = max(parts, key=lambda name: abs(parts[name]))
            found.append(f"a step took {step:.4g} s, not {low:.4g} to {high:.4g}; most by {part}: {parts[part]:+.4g} s")
        if self.memory and abs(self.memory[1] - self.memory[0]) > 0.1 * self.memory[0]:
            said, measured = (each / 2**30 for each in self.memory)
            found.append(f"the fullest rank had {measured:.2f} GiB of memory, not {said:.2f}")
        for axis, (said, measured) in self.bytes.items():
            if abs(measured - said) > 0.01 * max(said, measured):
                found.append(f"the busiest rank received {measured:,.0f} bytes a step on axis {axis}, not {said:,.0f}")
        return found

    def text(self) -> str:
        """For people."""
        lines = [f"plan for {self.machine} beside this run", table(self.seconds)]
        if self.memory:
            lines.append("memory     {:8.2f} GiB  {:6.2f} GiB".format(*(each / 2**30 for each in self.memory)))
        lines += [f"the plan was wrong: {each}" for each in self.wrong]
        return "\n".join(lines)

    def to_json(self) -> str:
        return json.dumps({**dataclasses.asdict(self), "wrong": self.wrong})


def outcome(config: Config, machine: Machine, records: Sequence[Mapping], ranks: Sequence[Mapping]) -> Outcome:
    """
    Args:
        records: a run's metrics; the last job's are judged.
        ranks: of ranks.json, or none.

    Raises:
        ValueError: as `learn.compare`.
    """
    prediction = predict(config, machine)
    received = [{axis: n / max(1, rank["steps"]) for axis, n in rank["bytes_received"].items()} for rank in ranks]
    busiest = max(received, key=lambda axes: sum(axes.values()), default={})
    moved = {axis: (prediction.bytes[axis], n) for axis, n in busiest.items() if n or prediction.bytes[axis]}
    used = [
        rank["device_memory"] + machine.device.reserved if rank["device_memory"] else rank["memory"] for rank in ranks
    ]
    memory = (prediction.memory_bytes, max(used)) if used else None
    seconds = compare(config, machine, of_last_job(records, ranks))
    return Outcome(machine.name, prediction, seconds, moved, memory)
