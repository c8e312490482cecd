"""`hpctrain jobs`: this user's submitted runs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from hpctrain.slurm import client, submitted

SUMMARY = "list the submitted runs: state, last step, loss, tokens/s"
HEADER = ("job", "state", "run", "step", "loss", "tokens/s")


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--last", type=int, default=20, metavar="N", help="how many, the newest last (20)")


def run(options: argparse.Namespace) -> None:
    client.require("`hpctrain jobs` lists what `hpctrain submit` gave to it")
    rows = [HEADER, *(_row(job) for job in submitted.read()[-options.last :])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


def _row(job: submitted.Submitted) -> tuple[str, ...]:
    facts = client.show(job.job)
    run = Path(job.run) if job.run else None
    record = last_record(run / "metrics.jsonl") if run else None
    if facts:
        state = client.state(facts)
    elif facts is None:
        state = "UNKNOWN"  # no answer
    else:  # forgotten by Slurm
        state = "COMPLETED" if run and (run / "model/config.json").exists() else "ENDED"
    figures = ("", "", "")
    if record:
        loss = "skipped" if record["loss"] is None else f"{record['loss']:.4f}"
        figures = str(record["step"]), loss, f"{record['tokens_per_second']:,.0f}"
    return (job.job, state, run.name if run else Path(job.script).stem, *figures)


def last_record(path: Path) -> dict | None:
    """The last whole line of a run's metrics; None before the first."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 65536))
        lines = file.read().split(b"\n")[:-1]
    return json.loads(lines[-1]) if lines else None
