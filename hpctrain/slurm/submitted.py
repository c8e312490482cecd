"""What this user has submitted, kept in one file, as Slurm forgets a job minutes after its end."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Submitted:
    """A job: its number, with the task's where it is one of an array; its script; the run folder, if any."""

    job: str
    script: str
    run: str | None


def path() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
    return Path(state) / "hpctrain" / "jobs.jsonl"


def add(jobs: list[Submitted]) -> None:
    """
    Raises:
        OSError: where they cannot be written; the older ones stay as they are.
    """
    file = path()
    file.parent.mkdir(parents=True, exist_ok=True)
    torn = file.exists() and not file.read_bytes().endswith(b"\n")
    with file.open("a", encoding="utf-8") as lines:
        lines.write("\n" * torn + "".join(json.dumps(asdict(job)) + "\n" for job in jobs))


def note(job: str, jobs: list[Submitted]) -> None:
    """Like `add`, for a job that Slurm has accepted: prints a warning where the file cannot be written, as in a full
    home folder."""
    try:
        add(jobs)
    except OSError as error:
        print(f"WARNING: `hpctrain jobs` will not show job {job}: {error}", file=sys.stderr, flush=True)


def read() -> list[Submitted]:
    """All of them, the oldest first."""
    file = path()
    if not file.exists():
        return []
    jobs = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            jobs.append(Submitted(**json.loads(line)))
        except (ValueError, TypeError):
            continue  # torn: the disk was full
    return jobs


def tasks(array: str) -> list[int]:
    """The numbers that an --array option names.

    >>> tasks("0-3,7,10-20:5%2")
    [0, 1, 2, 3, 7, 10, 15, 20]
    >>> tasks("a")
    Traceback (most recent call last):
    ValueError: --array must read like 0-3,7 or 0-30:10%2, got 'a'
    >>> tasks("3-1")
    Traceback (most recent call last):
    ValueError: --array must read like 0-3,7 or 0-30:10%2, got '3-1'
    """
    numbers: list[int] = []
    for part in array.split("%")[0].split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part)
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"--array must read like 0-3,7 or 0-30:10%2, got {array!r}")
        first, last, step = match.groups()
        numbers += range(int(first), int(last or first) + 1, int(step or 0) or 1)
    return numbers
