"""A job's time limit, and whether Slurm's warning before it leaves the job any time."""

from __future__ import annotations

import re
from pathlib import Path

EARLY = 60  # seconds before the time that --signal names at which Slurm may send it already


def check_time(script: Path, limit: str) -> None:
    """Raise ValueError for a time limit so short that Slurm's warning may come at the job's start: it would save,
    having done nothing, and go back into the queue for ever."""
    text = script.read_text(encoding="utf-8")
    requeues = re.search(r"^#HPCTRAIN|^#SBATCH\s.*--requeue", text, re.MULTILINE)
    warned = re.search(r"^#SBATCH\s(?:.*\s)?--signal[=\s]\s*\S*@(\d+)", text, re.MULTILINE)
    if requeues and warned and 0 < (seconds(limit) or 0) <= (least := int(warned[1]) + EARLY):
        raise ValueError(
            f"--time must be above {least // 60}:{least % 60:02d}, got {limit}: {script.name} asks to be warned "
            f"{warned[1]} s before its end, which Slurm does up to {EARLY} s earlier"
        )


def seconds(limit: str) -> int | None:
    """A time limit as sbatch reads it, which rounds it up to minutes; 0 is none, and so is what it does not read.

    >>> [seconds(text) for text in ("30", "1:30", "2:00:00", "1-0", "1-2:3:4", "0", "soon")]
    [1800, 120, 7200, 86400, 93840, 0, None]
    """
    if not re.fullmatch(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}", limit):
        return None
    days, dash, rest = limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    exact = 86400 * int(days or 0) + sum(part * unit for part, unit in zip(parts, units))
    return -(-exact // 60) * 60
