"""A rank that is stuck in communication says where and with whom, and ends the job."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
import traceback
from collections import deque

REMEMBERED = 12  # operations
GRACE = 2.0  # seconds for the other ranks' reports before the first one ends the job


class Watch:
    """Notes what a rank does in communication; its thread looks whether that takes too long. Made by all ranks.

    Args:
        grid: of which all communication is watched from now on.
        limit: seconds that an operation may take.
    """

    def __init__(self, grid, limit: float):
        self.grid, self.limit = grid, limit
        self.hosts = grid.comm.allgather(socket.gethostname())
        self._main = threading.get_ident()
        self._current: tuple | None = None
        self._done: deque[tuple] = deque(maxlen=REMEMBERED)
        grid.wire.watch = self
        threading.Thread(target=self._look, name="hpctrain watchdog", daemon=True).start()

    def begin(self, axis, name: str, peer: int | None) -> None:
        """An operation starts: along an axis, with one rank of it or, for None, with all."""
        self._current = time.monotonic(), axis, name, peer

    def end(self) -> None:
        start, axis, name, peer = self._current
        self._done.append((time.monotonic() - start, axis.name, name, peer))
        self._current = None

    @contextlib.contextmanager
    def during(self, axis, name: str):
        """Around what is no operation on tensors."""
        self.begin(axis, name, None)
        try:
            yield
        finally:
            self.end()

    def _look(self):
        while True:
            time.sleep(min(1.0, self.limit / 4))
            current = self._current
            if current and time.monotonic() - current[0] > self.limit:
                print(self.report(*current), file=sys.stderr, flush=True)
                time.sleep(GRACE)
                if self._current is current:
                    abort(self.grid.comm)

    def report(self, start: float, axis, name: str, peer: int | None) -> str:
        """Where this rank is, whom it waits for, what it did before, and its stack."""
        rank, members = self.grid.rank, self.grid.members(axis.name)
        others = [r for r in members if r != rank] if peer is None else [members[peer]]
        awaited = ", ".join(f"{r} ({self.hosts[r]})" for r in others)
        lines = [
            f"hpctrain: rank {rank} of {self.grid.size} ({self.hosts[rank]}) is stuck: {name} along {axis.name} has "
            f"taken {time.monotonic() - start:.0f} s, it waits for rank {awaited}",
            f"rank {rank}, its last operations:",
        ]
        for seconds, along, what, other in self._done:
            with_whom = "" if other is None else f" with rank {self.grid.members(along)[other]}"
            lines.append(f"    {what} along {along}{with_whom}: {seconds * 1e3:.1f} ms")
        lines.append(f"rank {rank}, its stack:")
        frame = sys._current_frames().get(self._main)
        lines += [line.rstrip() for line in traceback.format_stack(frame)] if frame else []
        return "\n".join(lines)


class Watched:
    """A communicator's calls on Python objects, watched as well."""

    def __init__(self, watch: Watch):
        self._watch, self._comm = watch, watch.grid.comm
        self.rank, self.size = self._comm.rank, self._comm.size

    def allgather(self, value):
        with self._watch.during(self._watch.grid.world, "allgather"):
            return self._comm.allgather(value)

    def gather(self, value):
        with self._watch.during(self._watch.grid.world, "gather"):
            return self._comm.gather(value)

    def bcast(self, value):
        with self._watch.during(self._watch.grid.world, "bcast"):
            return self._comm.bcast(value)


def abort(comm) -> None:
    """End the job, from a thread beside one that is inside MPI."""
    from mpi4py import MPI

    if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
        comm.Abort(1)
    os._exit(1)  # the launcher ends the others
