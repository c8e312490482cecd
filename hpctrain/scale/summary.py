"""The figures of a study: medians and spreads over the repeats of each point."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

from hpctrain.scale.results import Results

KIND = ("mode", "vary", "steps", "threads")
SURROUNDINGS = ("commit", "mpi", "modules", "processor")


@dataclass(frozen=True)
class Row:
    """One point. Speeds and efficiencies are lists, one of each repeat; the other figures are medians."""

    ranks: int
    grid: dict[str, int]
    config: str
    flops_per_second: list[float]
    tokens_per_second: float
    step_seconds: float
    seconds: dict[str, float]
    received: dict[str, float]
    formula: dict[str, float] | None  # None where there is none
    bound: dict[str, float] | None
    mfu: float
    memory: float
    oversubscribed: bool
    lacking: float  # cores that others used, of those that the ranks needed
    efficiency: list[float]

    @property
    def median_flops_per_second(self) -> float:
        return _median(self.flops_per_second)

    @property
    def median_efficiency(self) -> float:
        return _median(self.efficiency)


@dataclass(frozen=True)
class Study:
    """Rows by rising ranks, and what they were measured in. `first` is the smallest number of ranks of the study, which
    may not have been measured yet."""

    name: str
    mode: str
    vary: str
    rows: list[Row]
    first: int
    about: dict


def summarise(folder: Path, description: dict | None = None) -> Study:
    """The study of this description by `runner.describe_study`; without one that of the newest measurement.

    Raises:
        ValueError: when nothing was measured in `folder`.
    """
    results = Results(folder).read() if folder.is_dir() else []
    if not results:
        raise ValueError(
            f"{folder} holds no measurements ({folder / 'results.jsonl'}); run `hpctrain scale` into it first"
        )
    description = description or results[-1]
    # measured before studies were noted: the newest of each number of ranks, of the same kind
    kind = [(r["ranks"], r["key"]) for r in results if all(r[k] == description.get(k) for k in KIND)]
    keys = dict(description.get("study", kind))
    latest = [r for r in results if r["key"] in keys.values()][-1]
    measured = {ranks: [r for r in results if r["key"] == key] for ranks, key in sorted(keys.items())}
    measured = {ranks: repeats for ranks, repeats in measured.items() if repeats}
    first, rows = None, []
    for ranks, repeats in measured.items():
        speeds = [r["flops"] / r["step_seconds"] for r in repeats]
        first = first or _median(speeds) / ranks
        rows.append(
            Row(
                ranks=ranks,
                grid=repeats[0]["grid"],
                config=repeats[0]["config"],
                flops_per_second=speeds,
                tokens_per_second=_median(r["tokens_per_second"] for r in repeats),
                step_seconds=_median(r["step_seconds"] for r in repeats),
                seconds={part: _median(r["seconds"][part] for r in repeats) for part in repeats[0]["seconds"]},
                received=repeats[0]["bytes_received"],
                formula=repeats[0]["bytes_formula"],
                bound=repeats[0]["bytes_bound"],
                mfu=_median(r["mfu"] for r in repeats),
                memory=max(r["memory"] for r in repeats),
                oversubscribed=any(r["oversubscribed"] for r in repeats),
                lacking=_median(r.get("cores_lacking", 0.0) for r in repeats),  # older measurements do not say
                efficiency=[speed / ranks / first for speed in speeds],
            )
        )
    about = {key: latest[key] for key in ("commit", "mpi", "modules", "hosts", "threads", "steps", "time")}
    about["processor"] = latest.get("processor", "processor not noted")
    each = [r for repeats in measured.values() for r in repeats]
    about["several"] = [name for name in SURROUNDINGS if len({str(r.get(name)) for r in each}) > 1]
    return Study(folder.resolve().name, description["mode"], description["vary"], rows, min(keys), about)


def _median(values) -> float:
    return statistics.median(list(values))
