"""Reasons to stop early: a signal to any rank, or the clock. Noted here, acted on at the end of a step by all ranks."""

from __future__ import annotations

import signal
import time

STOPPED = 85  # exit status of a job that saved and is to be started again with --resume; jobs/supervise.sh requeues it

# The largest code of all ranks counts.
REASONS = {0: "", 1: "run.max_seconds", 2: "SIGUSR1", 3: "SIGTERM"}


class Interrupts:
    """Takes over SIGUSR1 (Slurm's warning before the time limit) and SIGTERM. Further signals change nothing.

    Attributes: `max_seconds`, from the making of this object until the clock is a reason to stop; 0 for never.
    """

    def __init__(self, max_seconds: float = 0.0):
        self.max_seconds = max_seconds
        self._start, self._signalled = time.monotonic(), 0
        for code in (2, 3):
            signal.signal(signal.Signals[REASONS[code]], self._note)

    @property
    def code(self) -> int:
        """Why this rank would stop, of REASONS; 0 for no reason."""
        late = self.max_seconds and time.monotonic() - self._start >= self.max_seconds
        return max(self._signalled, int(bool(late)))

    def _note(self, number, _):
        self._signalled = max(self._signalled, {signal.SIGUSR1: 2, signal.SIGTERM: 3}[number])
