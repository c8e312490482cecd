"""What a run folder holds, as its report says it: numbers, sentences and tables; without MPI and torch."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.config import Config, load_config
from hpctrain.plan.learn import of_last_job
from hpctrain.train.progress import in_words

MIB = 2**20
AXES = ("data", "sequence", "expert", "pipeline", "tensor")
NEEDED = {"step", "loss", "tokens", "seconds", "tokens_per_second"}  # of a step's record
SHOWN = 40  # ranks in a table; the first and the last of more
DOUBTFUL = 0.2  # spread of the speed, as a part of its median, from which it is doubtful


@dataclass(frozen=True)
class Run:
    """Attributes: `records`, the lines of its metrics; `ranks`, what ranks.json says of each, and `about`, of the job;
    both empty where the job was killed before it could say."""

    folder: Path
    records: list[dict[str, Any]]
    ranks: list[dict[str, Any]]
    about: dict[str, Any]

    @property
    def trained(self) -> list[dict[str, Any]]:
        """Steps that were not left out."""
        return [record for record in self.records if record["loss"] is not None]

    @property
    def last_job(self) -> Sequence[dict[str, Any]]:
        """The records of the last job's steps."""
        return of_last_job(self.records, self.ranks)

    @property
    def steady(self) -> list[float]:
        """Tokens a second of the last job's steps but for the first tenth, in which caches fill."""
        speeds = [record["tokens_per_second"] for record in self.last_job or self.records]
        return speeds[-(-len(speeds) // 10) :] or speeds


def read(folder: Path) -> Run:
    """
    Raises:
        ValueError: for a folder without metrics of a step, and a ranks.json that is damaged.
    """
    path = folder / "metrics.jsonl"
    records = read_metrics(path) if path.is_file() else []
    if not records:
        raise ValueError(f"{path} has no step yet; give a run folder, such as runs/gpt2")
    about = _table(folder / "ranks.json")
    return Run(folder, records, about.pop("ranks", []), about)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a run's metrics, without a line that is being written or was cut.

    Raises:
        ValueError: for a line of something else.
    """
    records = []
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if not isinstance(record, dict) or not record.keys() >= NEEDED:
                raise ValueError(
                    f"{path} is damaged: {line[:60].strip()} is not the line of a step, which has "
                    f"{', '.join(sorted(NEEDED))}; delete it"
                )
            records.append(record)
    return records


def _table(path: Path) -> dict[str, Any]:
    """Of a file of JSON; empty where there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); delete it, and the report goes without it") from error


def read_job(folder: Path) -> tuple[Config, Sequence[dict[str, Any]]]:
    """The configuration of a run folder, and the metrics of the last job, whose it is.

    Raises:
        ValueError, OSError: where it is no run folder.
    """
    return load_config(folder / "config.toml"), read(folder).last_job


def sentence(run: Run) -> str:
    """The result.

    >>> steps = [{"step": n, "loss": 6.0 - n, "tokens": 10 * n, "seconds": 30.0, "tokens_per_second": 9.0}
    ...          for n in (1, 2)]
    >>> sentence(Run(Path("a"), [*steps, steps[1] | {"step": 3, "tokens": 30, "val_loss": 4.5}], [], {}))
    '3 steps, 30 tokens in 1.5 minutes: training loss 5.000 → 4.000, validation loss 4.500 (nats a token); 9 tokens/s'
    """
    last, trained = run.records[-1], run.trained
    seconds = sum(record["seconds"] for record in run.records)
    losses = []
    if trained:
        losses.append(f"training loss {trained[0]['loss']:.3f} → {trained[-1]['loss']:.3f}")
    if evaluated := [record["val_loss"] for record in run.records if "val_loss" in record]:
        losses.append(f"validation loss {in_words(evaluated[-1], 3)}")
    words = f": {', '.join(losses)} (nats a token)" if losses else ""
    speed = f"{statistics.median(run.steady):,.0f} tokens/s"
    return f"{last['step']:,} steps, {last['tokens']:,} tokens in {duration(seconds)}{words}; {speed}"


def duration(seconds: float) -> str:
    """
    >>> [duration(seconds) for seconds in (8.25, 90, 9000)]
    ['8.2 seconds', '1.5 minutes', '2.5 hours']
    """
    for size, name in ((3600, "hours"), (60, "minutes")):
        if seconds >= size:
            return f"{seconds / size:.1f} {name}"
    return f"{seconds:.1f} seconds"


def facts(run: Run) -> list[str]:
    """The surroundings, without which figures say little."""
    about = run.about
    if not about:
        return ["The job ended before it could say what it ran on: the times and bytes below are those of rank 0."]
    hosts = sorted({rank["host"] for rank in run.ranks})
    shown = ", ".join(hosts[:8]) + (f" and {len(hosts) - 8} more" if len(hosts) > 8 else "")
    return [
        f"{about['model']}; {about['grid']}; {about['precision']}.",
        f"{len(run.ranks)} rank(s) on {shown}; {about['device']}, {about['threads']} thread(s) a rank; {about['mpi']}; "
        f"torch {about['torch']}; {about['transport']}.",
    ]


def warnings(run: Run) -> list[str]:
    """What makes the figures doubtful, and what went wrong."""
    found = []
    skipped = [record["step"] for record in run.records if record["loss"] is None]
    if skipped:
        found.append(f"{len(skipped)} step(s) were left out, the first is {skipped[0]}: see skipped in metrics.jsonl.")
    quarters = statistics.quantiles(run.steady, n=4) if len(run.steady) > 3 else []
    if quarters and quarters[2] - quarters[0] > DOUBTFUL * quarters[1]:
        found.append(
            f"The speed is doubtful: half of the steps lie outside of {quarters[0]:,.0f} to {quarters[2]:,.0f} "
            "tokens/s; others may have used the cores."
        )
    if len(run.steady) < 10:
        found.append(f"The speed is that of {len(run.steady)} step(s) only.")
    stalled = sum(record.get("checkpoint_seconds", 0.0) for record in run.records)
    total = sum(record["seconds"] for record in run.records)
    if stalled > 0.05 * total:
        found.append(f"Training waited {duration(stalled)} for checkpoints, {100 * stalled / total:.0f} % of its time.")
    return found + _uneven(run)


def _uneven(run: Run) -> list[str]:
    """Ranks that compute for much longer than others."""
    own = {rank["rank"]: rank["time"]["compute"] for rank in run.ranks}
    if len(own) < 2:
        return []
    usual, (slowest, most) = statistics.median(own.values()), max(own.items(), key=lambda each: each[1])
    if most <= 1.5 * usual:
        return []
    host = run.ranks[slowest]["host"]
    return [f"Rank {slowest} ({host}) computed for {most / usual:.1f} times as long as the median rank."]


PARTS = ("compute", "reading", *AXES, "bubble", "agreeing")
RANK_HEADER = (
    "rank", "host", "place", *PARTS, "MiB sent", "MiB received", "memory MiB",
)  # fmt: skip


def rank_rows(run: Run) -> list[list[str]]:
    """A line a rank: milliseconds of a step by part, MiB of a step, and the memory of the process or device."""
    rows = []
    for rank in shown(run.ranks):
        steps, place = max(1, rank["steps"]), " ".join(str(place) for place in rank["coords"].values())
        moved = [sum(rank[way].values()) / steps / MIB for way in ("bytes_sent", "bytes_received")]
        rows.append(
            [
                str(rank["rank"]), rank["host"], place, *(f"{1e3 * rank['time'][part] / steps:.2f}" for part in PARTS),
                *(f"{each:.3f}" for each in moved), f"{(rank['device_memory'] or rank['memory']) / MIB:,.0f}",
            ]
        )  # fmt: skip
    return rows


PLAN_HEADER = ("", "predicted", "measured")


def plan_rows(folder: Path) -> tuple[str, list[list[str]], list[str]]:
    """The machine of a run's plan, a line for each part of a step, for bytes and memory, and what the plan had wrong,
    where plan.json tells of them."""
    outcome = _table(folder / "plan.json")
    if not outcome:
        return "", [], []
    rows = [[part, *(f"{each:.4g} s" for each in both)] for part, both in outcome["seconds"].items() if any(both)]
    for axis, both in outcome["bytes"].items():
        rows.append([f"received on {axis}", *(f"{each / 2**20:,.3f} MiB" for each in both)])
    if outcome["memory"]:
        rows.append(["memory", *(f"{each / 2**30:.2f} GiB" for each in outcome["memory"])])
    return outcome["machine"], rows, [f"The plan was wrong: {each}." for each in outcome["wrong"]]


def shown(ranks: Sequence[Any]) -> list[Any]:
    """
    >>> shown(range(3)), len(shown(range(1000))), shown(range(1000))[-1]
    ([0, 1, 2], 40, 999)
    """
    return [*ranks] if len(ranks) <= SHOWN else [*ranks[: SHOWN // 2], *ranks[-SHOWN // 2 :]]


AXIS_HEADER = ("axis", "sent a step and rank, MiB", "received", "of the busiest rank", "all ranks, GiB")


def axis_rows(run: Run) -> list[list[str]]:
    """A line an axis: bytes of a step, mean over ranks, and of the rank that receives most; those of the whole job."""
    rows = []
    for axis in AXES:
        sent, received = ([rank[f"bytes_{way}"].get(axis, 0) for rank in run.ranks] for way in ("sent", "received"))
        steps = max(1, run.ranks[0]["steps"])
        rows.append(
            [
                axis, *(f"{statistics.fmean(each) / steps / MIB:.3f}" for each in (sent, received)),
                f"{max(received) / steps / MIB:.3f}", f"{sum(sent) / 2**30:.3f}",
            ]
        )  # fmt: skip
    return rows
