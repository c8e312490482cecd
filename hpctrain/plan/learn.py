"""What runs took beside what was predicted of them, and what a machine file learns from it."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TypeVar

from hpctrain.config import Config
from hpctrain.plan.estimator import Estimator
from hpctrain.plan.job import read
from hpctrain.plan.machine import Learned, Machine
from hpctrain.plan.prediction import predict

WARM_UP = 2  # steps that a run is not judged by
# Parts of a step as a run's metrics have them, and those of a prediction that they are.
MEASURED = {
    "compute": ("compute", "optimizer"),
    "data": ("data",),
    "tensor": ("tensor",),
    "sequence": ("sequence",),
    "expert": ("expert",),
    "bubble": ("bubble",),
    "reading": ("reading",),
    "agreeing": ("stragglers",),
}
ALSO = {"bubble": ("pipeline",)}  # others of the metrics
LEARNED = ("compute", "data", "tensor", "sequence")
SMALL = 0.01  # parts of a step below that teach nothing
Record = TypeVar("Record")


def compare(config: Config, machine: Machine, records: Sequence[Mapping]) -> dict[str, tuple[float, float]]:
    """{part: (predicted, measured)} in seconds, medians over the steps of a run's metrics, and "step" for all. Parts
    are those of rank 0, which writes the metrics: in a pipeline other ranks may compute for much longer.

    Raises:
        ValueError: where too few steps were taken, and as `predict`.
    """
    judged = [record for record in records if "time" in record][WARM_UP:]
    if not judged:
        raise ValueError(f"a run teaches from its step {WARM_UP + 1} on, got {len(records)} steps; train longer")
    job, choice = read(config)
    parts = Estimator(job, machine.crowded(config.ranks)).estimate(choice, rank=0).parts
    if job.servers:  # rank 0 is a worker, which updates nothing
        parts["optimizer"] = 0.0
    found = {"step": (predict(config, machine).seconds, statistics.median(record["seconds"] for record in judged))}
    for part, of in MEASURED.items():
        measured = (part, *ALSO.get(part, ()))
        taken = statistics.median(sum(record["time"].get(name, 0.0) for name in measured) for record in judged)
        found[part] = sum(parts[name] for name in of), taken
    return found


def table(found: Mapping[str, tuple[float, float]]) -> str:
    """For people."""
    lines = ["of rank 0  predicted s  measured s"]
    for part, (predicted, measured) in found.items():
        if predicted or measured:
            ratio = f"  {measured / predicted:.2f} times" if predicted else ""
            lines.append(f"{part:9}  {predicted:11.4g}  {measured:10.4g}{ratio}")
    return "\n".join(lines)


def of_last_job(records: Sequence[Record], ranks: Sequence[Mapping]) -> Sequence[Record]:
    """The records of the steps that a run's last job took, as those before may be of another grid; all of them where
    no `ranks` tell how many it took.

    >>> of_last_job([1, 2, 3], [{"steps": 2}]), of_last_job([1, 2, 3], [{"steps": 0}]), of_last_job([1, 2, 3], [])
    ([2, 3], [], [1, 2, 3])
    """
    return records[max(0, len(records) - ranks[0]["steps"]) :] if ranks else records


def learn(
    machine: Machine, runs: Mapping[str, tuple[Config, Sequence[Mapping]]]
) -> tuple[Machine, dict[str, dict[str, tuple[float, float]]]]:
    """The machine whose parts take what they took in these runs, by the median over the runs, and of each run what
    `compare` says by the machine as it was.

    Args:
        runs: {name: (its configuration, its metrics)}

    Raises:
        ValueError: as `compare`.
    """
    found = {name: compare(config, machine, records) for name, (config, records) in runs.items()}
    old = machine.learned
    factors = {}
    for part in LEARNED:
        ratios = [each[part][1] / each[part][0] for each in found.values() if each[part][0] > SMALL * each["step"][0]]
        if ratios and statistics.median(ratios) > 0:
            factors[part] = getattr(old, part) * statistics.median(ratios)
    if "compute" in factors:
        factors["optimizer"] = old.optimizer * factors["compute"] / old.compute
    return replace(machine, learned=replace(old, **factors, runs=old.runs + len(found))), found


def with_learned(text: str, learned: Learned) -> str:
    """A machine file with another table [learned], at its end.

    >>> print(with_learned("node = 1\\n\\n[learned]\\ndata = 2.0\\n", Learned(data=3.0, runs=1)))
    node = 1
    <BLANKLINE>
    [learned]  # measured over predicted seconds, by `hpctrain plan --learn`
    data = 3.0
    runs = 1
    """
    rest = re.sub(r"^\[learned\](?:.*\n?)(?:(?!\[).*\n?)*", "", text, flags=re.MULTILINE).rstrip("\n")
    changed = {key: value for key, value in asdict(learned).items() if value != getattr(Learned(), key)}
    lines = ["[learned]  # measured over predicted seconds, by `hpctrain plan --learn`"]
    lines += [f"{key} = {value if key == 'runs' else float(f'{value:.4g}')}" for key, value in changed.items()]
    return "\n".join([rest, "", *lines])
