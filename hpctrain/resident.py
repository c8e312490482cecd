"""Memory that this process has in the machine's."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path


def most_resident() -> int:
    """The largest resident set so far, in bytes. Of memory that it shares with other ranks now it counts its part, so
    that the ranks of a node together count no page twice."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with contextlib.suppress(OSError, KeyError):  # other systems have no such files, older ones not these lines
        most -= _bytes("status", "RssShmem") - _bytes("smaps_rollup", "Pss_Shmem")
    return most


def _bytes(file: str, name: str) -> int:
    lines = Path("/proc/self", file).read_text().splitlines()
    return 1024 * int(dict(line.partition(":")[::2] for line in lines)[name].split()[0])
