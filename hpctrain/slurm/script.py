"""What a job script will run, known and checked before it is submitted."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from hpctrain.config import Config, load_config
from hpctrain.slurm import submitted


def configurations(script: Path, arguments: list[str], array: str | None = None) -> list[Config | None]:
    """Those of the job's tasks, where it trains; None where not.

    A script that trains says so by a line `#HPCTRAIN config=FILE`, the configuration when the first argument is none.

    Raises:
        ValueError: for one that `hpctrain train` would refuse; better now than after hours in the queue.
    """
    tasks = submitted.tasks(array) if array else [None]
    default = re.search(r"^#HPCTRAIN config=(\S+)", script.read_text(encoding="utf-8"), re.MULTILINE)
    if not default:
        return [None] * len(tasks)
    root = checkout(script)
    found: list[Config | None] = []
    for task in tasks:
        overrides = [text if task is None else text.replace("%a", str(task)) for text in arguments]
        overrides = [text for text in overrides if not text.startswith("--resume")]
        path = root / default[1]
        if overrides and overrides[0].endswith(".toml"):
            named = Path(overrides.pop(0))
            path = named.resolve() if named.is_file() else root / named
        with contextlib.chdir(root):  # where the job finds a model of one's own
            found.append(load_config(path, overrides))
    return found


EARLY = 60  # seconds before the time that --signal names at which Slurm may send it already


def check_time(script: Path, limit: str) -> None:
    """Raise ValueError for a time limit so short that Slurm's warning may come at the job's start: it would save,
    having done nothing, and go back into the queue for ever."""
    warned = re.search(r"^#SBATCH\s+--signal=\S*@(\d+)", script.read_text(encoding="utf-8"), re.MULTILINE)
    if warned and 0 < (seconds(limit) or 0) <= (least := int(warned[1]) + EARLY):
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


def checkout(script: Path) -> Path:
    """Where the script runs."""
    return script.parent.parent
