"""`hpctrain jobs`: this user's submitted runs."""

from __future__ import annotations

import argparse
import contextlib
import glob
import json
import sys
import time
from pathlib import Path

from hpctrain.cli.export import has_weights
from hpctrain.slurm import client, submitted

SUMMARY = "list the submitted runs: state, last step, loss, tokens/s"
DAY = 86400.0
HEADER = ("job", "state", "run", "step", "loss", "tokens/s")


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--last", type=int, default=20, metavar="N", help="how many, the newest last (20)")
    command.add_argument(
        "--watch",
        type=seconds,
        nargs="?",
        const=5.0,
        metavar="SECONDS",
        help="again every 5 seconds, until all have ended",
    )


def seconds(text: str) -> float:  # by this name argparse refuses what is no number
    interval = float(text)
    if not 0 < interval <= DAY:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most {DAY}, got {text}")
    return interval


def run(options: argparse.Namespace) -> None:
    if options.last < 1:
        raise ValueError(f"--last must be at least 1, got {options.last}")
    client.require("`hpctrain jobs` lists what `hpctrain submit` gave to it")
    if options.watch is None:
        print(_table(_rows(options.last)))
    else:
        with contextlib.suppress(KeyboardInterrupt):
            _watch(options.last, options.watch)


def _watch(last: int, seconds: float) -> None:
    """Show the list again and again until all jobs have ended: in place on a terminal, elsewhere where it differs."""
    shown = None
    while True:
        rows = _rows(last)
        text = _table(rows)
        if sys.stdout.isatty():
            print(f"\x1b[H\x1b[2J{text}", flush=True)
        elif text != shown:
            print(text, flush=True)
        shown = text
        if all(state.split()[0] in (*client.ENDED, "ENDED") for _, state, *_ in rows):
            return
        time.sleep(seconds)


def _rows(last: int) -> list[tuple[str, ...]]:
    return [_row(job) for job in submitted.read()[-last:]]


def _table(rows: list[tuple[str, ...]]) -> str:
    rows = [HEADER, *rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def _row(job: submitted.Submitted) -> tuple[str, ...]:
    facts = client.show(job.job)
    run = Path(job.run) if job.run else None
    folder = folder_of(run, f"Slurm job {job.job}") if run else None
    record = last_record(folder / "metrics.jsonl", f"Slurm job {job.job}") if folder else None
    if facts:
        state = client.state(facts)
    elif facts is None:
        state = "UNKNOWN"  # no answer
    else:  # forgotten by Slurm
        state = "COMPLETED" if folder and has_weights(folder / "model") else "ENDED"
    figures = ("", "", "")
    if record:
        loss = "skipped" if record["loss"] is None else f"{record['loss']:.4f}"
        figures = str(record["step"]), loss, f"{record['tokens_per_second']:,.0f}"
    return (job.job, state, run.name if run else Path(job.script).stem, *figures)


def folder_of(run: Path, job: str) -> Path | None:
    """The folder in which a job has trained, under the run's name or that which a later run gave it; None where it has
    not, whatever others have left there."""
    for path in (run, *run.parent.glob(f"{glob.escape(run.name)}.*")):
        listed = path / "jobs"
        if listed.exists() and job in listed.read_text(encoding="utf-8").splitlines():
            return path
    return None


def last_record(path: Path, job: str) -> dict | None:
    """The last whole line of a run's metrics that a job wrote; None before the first."""
    if not path.exists():
        return None
    size = path.stat().st_size
    for length in (65536, size):  # it is near the end, unless other jobs have gone on
        with path.open("rb") as file:
            file.seek(max(0, size - length))
            lines = file.read().split(b"\n")[:-1]
        for line in reversed(lines[size > length :]):  # without one that was cut
            record = json.loads(line)
            if record.get("job") == job:
                return record
    return None
