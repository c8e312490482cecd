"""Slurm's own programs, asked and read."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT",
}  # fmt: skip


def require(instead: str) -> None:
    """Raise ValueError, which says what to do `instead`, where there is no Slurm."""
    if not shutil.which("sbatch"):
        raise ValueError(f"there is no Slurm here: sbatch is not on the PATH; {instead}")


def submit(arguments: list[str], environment: dict[str, str]) -> str:
    """Submit by `sbatch`; returns the job's number.

    Args:
        arguments: of sbatch: its options, the script and the script's arguments.
        environment: variables to set beside those of this process.

    Raises:
        ValueError: with sbatch's message, when it refuses.
    """
    done = subprocess.run(
        ["sbatch", "--parsable", *arguments], capture_output=True, text=True, env={**os.environ, **environment}
    )
    if done.returncode:
        raise ValueError(f"sbatch refused the job: {done.stderr.strip()}")
    return done.stdout.strip().split(";")[0]  # "number;cluster" where there are several


def show(job: str) -> dict[str, str] | None:
    """What `scontrol` knows of a job or array task, such as JobState and StdOut; {} once Slurm has forgotten it, and
    None where there is no answer: without scontrol, or from a busy controller."""
    try:
        done = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True)
    except FileNotFoundError:
        return None
    if done.returncode:
        return {} if "Invalid job id" in done.stderr else None
    # the first paragraph: an array's number also names its tasks, the last of them first
    record = done.stdout.split("\n\n")[0]
    facts = dict(word.split("=", 1) for word in record.split() if "=" in word)
    return facts | dict(re.findall("^ *(StdOut)=(.*)", record, re.MULTILINE))  # a path may have spaces


def state(facts: dict[str, str]) -> str:
    """The job's state with what explains it.

    >>> state({"JobState": "PENDING", "Reason": "Priority"})
    'PENDING (Priority)'
    >>> state({"JobState": "FAILED", "Reason": "NonZeroExitCode", "ExitCode": "2:0"})
    'FAILED (exit status 2)'
    """
    name, reason = facts["JobState"], facts.get("Reason", "None")
    if name == "FAILED":
        return f"FAILED (exit status {exit_status(facts)})"
    return f"{name} ({reason})" if name == "PENDING" and reason != "None" else name


def exit_status(facts: dict[str, str]) -> int:
    """As a shell would say it: 128 and the signal for a job that one ended, and never 0 for one that did not complete.

    >>> [exit_status({"JobState": s, "ExitCode": e}) for s, e in [("COMPLETED", "0:0"), ("TIMEOUT", "0:15")]]
    [0, 143]
    """
    status, signal = map(int, facts["ExitCode"].split(":"))
    ended_well = facts["JobState"] == "COMPLETED"
    return status or (128 + signal if signal else int(not ended_well))
