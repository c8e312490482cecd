"""An MPI job that a command starts and waits for, and that ends with it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

ENDINGS = (signal.SIGTERM, signal.SIGHUP)


def ranks_command(launcher: str, ranks: int, module: str) -> list[str]:
    """Starts one of hpctrain's modules on so many ranks; -P, as the working folder may hold somebody's torch.py."""
    return [launcher, "-n", str(ranks), sys.executable, "-P", "-m", "mpi4py", "-m", module]


def run_ranks(command: Sequence[str], timeout: float | None = None, **options: Any) -> subprocess.CompletedProcess:
    """As `subprocess.run`, but a signal that would end this process ends the launcher first: its ranks have another
    parent, and would go on by themselves.

    Raises:
        SystemExit: at SIGTERM and SIGHUP, with the status of a process that it ended, after the job's end.
        subprocess.TimeoutExpired: after `timeout` seconds, likewise.
    """
    usual = [number for number in ENDINGS if signal.getsignal(number) == signal.SIG_DFL]
    started, heard = False, []

    def end(number, _):
        heard.append(number)
        if started:  # while it is being started nobody knows its id
            raise SystemExit(128 + number)

    for number in usual:
        signal.signal(number, end)
    try:
        with subprocess.Popen(command, **options) as job:
            try:
                started = True
                if heard:
                    end(heard[0], None)
                said = job.communicate(timeout=timeout)
            except BaseException:
                job.terminate()
                job.wait()
                raise
        return subprocess.CompletedProcess(command, job.returncode, *said)
    finally:
        for number in usual:
            signal.signal(number, signal.SIG_DFL)
