"""Show a job's log while it grows."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from hpctrain.slurm import client

SECONDS = 2  # between questions to Slurm: they cost its controller, which all users share


def follow(job: str) -> int:
    """Print the job's log, and its state whenever that changes, until it ends; returns its exit status.

    A job that is requeued is followed on. Ctrl-C ends the following, not the job.
    """
    position, printed = 0, None
    facts: dict[str, str] = {}
    try:
        while True:
            latest = client.show(job)
            facts = latest or facts
            position = _print_from(facts.get("StdOut"), position)
            if latest is None:
                state = "no answer from Slurm, asking again"
            else:
                state = client.state(facts) if facts else "unknown to Slurm"
            if state != printed:
                print(f"job {job}: {state}", file=sys.stderr, flush=True)
                printed = state
            if latest == {} or facts.get("JobState", "") in client.ENDED and facts.get("Requeue") != "2":
                _print_from(facts.get("StdOut"), position)  # what was written meanwhile
                return client.exit_status(facts) if facts else 1
            time.sleep(SECONDS)
    except KeyboardInterrupt:
        print(f"\njob {job} goes on; `scancel {job}` ends it, `hpctrain jobs` tells of it", file=sys.stderr)
        return 0


def _print_from(log: str | None, position: int) -> int:
    if log and Path(log).exists():
        with open(log, "rb") as file:
            file.seek(position)
            sys.stdout.write(file.read().decode(errors="replace"))
            sys.stdout.flush()
            position = file.tell()
    return position
