"""Reasons to stop early: a signal to any rank, or the clock. Noted here, acted on at the end of a step by all ranks."""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import signal
import termios
import threading
import time

STOPPED = 85  # exit status of a job that saved and is to be started again with --resume; jobs/guard.py requeues it
ENDED_AT_ONCE = 130  # of one that was not left the time to save

# The largest code of all ranks counts.
REASONS = {0: "", 1: "run.max_seconds", 2: "SIGUSR1", 3: "SIGTERM", 4: "SIGHUP", 5: "SIGINT"}
CODES = {signal.Signals[name]: code for code, name in REASONS.items() if name.startswith("SIG")}


class Interrupts:
    """Takes over SIGUSR1 (Slurm's warning before the time limit, jobs/guard.py), SIGTERM, SIGHUP and SIGINT; what is
    ignored (nohup) stays so. Further signals change nothing, except for Ctrl-C once more, and for SIGUSR2, by which
    jobs/guard.py passes that on: they end this process at once, whatever it is doing.

    Attributes:
        max_seconds: from the making of this object until the clock is a reason to stop; 0 for never.
        saved: tells what was saved last; said by a rank that is ended at once.
        leads: whether this rank says it.
    """

    def __init__(self, max_seconds: float = 0.0):
        self.max_seconds, self.leads = max_seconds, False
        self.saved = lambda: "nothing is saved"
        self._start, self._signalled = time.monotonic(), 0
        receiving, sending = os.pipe()
        os.set_blocking(sending, False)
        # Python's handlers wait for the end of a long operation; a thread need not
        signal.set_wakeup_fd(sending, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(receiving,), name="hpctrain signals", daemon=True).start()
        self.take_over()
        atexit.register(_leave_in_peace)

    def take_over(self) -> None:
        """Once more after MPI has begun: Open MPI 5 takes SIGHUP, and does nothing with it."""
        for number in CODES:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._note)
        signal.signal(signal.SIGUSR2, lambda *_: None)  # which the thread hears

    @property
    def code(self) -> int:
        """Why this rank would stop, of REASONS; 0 for no reason."""
        late = self.max_seconds and time.monotonic() - self._start >= self.max_seconds
        return max(self._signalled, int(bool(late)))

    def _note(self, number, _):
        self._signalled = max(self._signalled, CODES[number])
        if number == signal.SIGHUP:
            _silence()

    def _listen(self, receiving: int) -> None:
        first = 0.0
        while True:
            for number in os.read(receiving, 100):
                now = time.monotonic()
                # `timeout` sends its signal twice
                if number == signal.SIGUSR2 or (number == signal.SIGINT and first and now > first + 1):
                    self._end()
                if number == signal.SIGINT:
                    first = first or now

    def _end(self) -> None:
        if self.leads:
            with contextlib.suppress(OSError):
                os.write(2, f"hpctrain: ended at once; {self.saved()}\n".encode())
        else:
            time.sleep(1)  # as the first to end takes all others along
        os._exit(ENDED_AT_ONCE)


def _leave_in_peace() -> None:
    """From now on no signal takes away the status that was decided on: Python would leave them to kill."""
    for number in CODES:
        signal.signal(number, signal.SIG_IGN)


def _silence() -> None:
    """Where the terminal is gone, nothing that is said must be the error that ends the job."""
    for file in (1, 2):
        try:
            termios.tcgetattr(file)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, file)
                os.close(nowhere)
