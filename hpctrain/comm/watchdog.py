"""A rank that is stuck in communication says where and with whom, and ends the job."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hpctrain.grid import Axis, Grid

if TYPE_CHECKING:
    from mpi4py import MPI

REMEMBERED = 12  # operations
GRACE = 2.0  # seconds after its report for which an operation may still end well; other ranks report meanwhile
PATIENCE = 10  # times the limit for waiting until other ranks have done work of their own, such as writing files
REPORTS = 16  # ranks of a job that report in full; the others say one line each
NAMED = 8  # ranks that a report names at most
FRAMES = 12  # of the stack in a report


class Alarm:
    """When an operation is reported, and when its rank ends the job.

    An operation's age is the time for which this process ran, known by how late the looks come that are due every
    `interval` seconds: a job that was stopped and goes on (`scontrol suspend`, Ctrl-Z) has waited for nobody meanwhile.
    """

    def __init__(self, interval: float, now: float):
        self._interval, self._looked = interval, now
        self._seen: tuple | None = None
        self._stopped, self._reported = 0.0, False

    def look(self, now: float, current: tuple | None) -> str | None:
        """What to do about the operation under way, (start, limit, ...), the same object until it ends: "report",
        "abort" or None."""
        late = now - self._looked - self._interval
        self._looked = now
        if current is not self._seen:
            self._seen, self._stopped, self._reported = current, 0.0, False
        if current is None:
            return None
        start, limit = current[:2]
        if late > self._interval:
            self._stopped += min(late, now - start)
        age = now - start - self._stopped
        if not self._reported:
            self._reported = age > limit
            return "report" if self._reported else None
        return "abort" if age > limit + GRACE else None


class Watchdog:
    """Notes what a rank does in communication; its thread looks whether that takes too long. Made by all ranks.

    Args:
        grid: of which all communication is watched from now on.
        limit: seconds that an operation may take, while this process runs. Where ranks agree on how work of their own
            went (`comm.agree`, `comm.together`), a slow disk of one of them is waited for `PATIENCE` times as long.
    """

    def __init__(self, grid: Grid, limit: float):
        self.grid, self.limit = grid, limit
        self.hosts = grid.comm.allgather(socket.gethostname())
        self._main = threading.get_ident()
        self._current: tuple[float, float, Axis, str, int | None] | None = None
        self._done: deque[tuple] = deque(maxlen=REMEMBERED)
        grid.transport.watchdog = self
        watched = weakref.ref(self)
        threading.Thread(target=_look, args=(watched, limit), name="hpctrain watchdog", daemon=True).start()

    def begin(self, axis: Axis, name: str, peer: int | None, patience: int = 1) -> None:
        """An operation starts: along an axis, with one rank of it or, for None, with all."""
        self._current = time.monotonic(), self.limit * patience, axis, name, peer

    def end(self) -> None:
        assert self._current is not None
        start, _, axis, name, peer = self._current
        self._done.append((time.monotonic() - start, axis.name, name, peer))
        self._current = None

    @contextlib.contextmanager
    def during(self, axis: Axis, name: str, patience: int = 1) -> Iterator[None]:
        """Around what is no operation on tensors."""
        self.begin(axis, name, None, patience)
        try:
            yield
        finally:
            self.end()

    def report(self, start: float, limit: float, axis: Axis, name: str, peer: int | None) -> str:
        """Where this rank is and whom it waits for; on some ranks also what it did before, and its stack."""
        rank, size, members = self.grid.rank, self.grid.size, self.grid.members(axis.name)
        others = [r for r in members if r != rank] if peer is None else [members[peer]]
        awaited = ", ".join(f"{r} ({self.hosts[r]})" for r in others[:NAMED])
        if len(others) > NAMED:
            awaited += f" and {len(others) - NAMED} others"
        lines = [
            f"hpctrain: rank {rank} of {size} ({self.hosts[rank]}) is stuck: {name} along {axis.name} has "
            f"taken {time.monotonic() - start:.0f} s, it waits for rank {awaited}"
        ]
        if rank % -(-size // REPORTS):
            return lines[0]
        lines.append(f"rank {rank}, its last operations:")
        for seconds, along, what, other in self._done:
            with_whom = "" if other is None else f" with rank {self.grid.members(along)[other]}"
            lines.append(f"    {what} along {along}{with_whom}: {seconds * 1e3:.1f} ms")
        lines.append(f"rank {rank}, its stack:")
        frame = sys._current_frames().get(self._main)
        lines += [line.rstrip() for line in traceback.format_stack(frame)[-FRAMES:]] if frame else []
        return "\n".join(lines)


def _look(watched: weakref.ref[Watchdog], limit: float) -> None:
    """The thread of a `Watchdog`, given by a weak reference: it ends with its grid."""
    interval = min(1.0, limit / 4)
    alarm = Alarm(interval, time.monotonic())
    while True:
        time.sleep(interval)
        watchdog = watched()
        if watchdog is None:
            return
        current = watchdog._current
        action = alarm.look(time.monotonic(), current)
        if action == "report" and current is not None:
            print(watchdog.report(*current), file=sys.stderr, flush=True)
        elif action == "abort":
            abort(watchdog.grid.comm)
        del watchdog, current


class WatchedComm:
    """A communicator's calls on Python objects, watched as well."""

    def __init__(self, watchdog: Watchdog):
        self._watchdog, self._comm = watchdog, watchdog.grid.comm
        self.rank, self.size = self._comm.rank, self._comm.size

    def allgather(self, value: Any, patience: int = 1) -> list:
        with self._watchdog.during(self._watchdog.grid.world, "allgather", patience):
            return self._comm.allgather(value)

    def gather(self, value: Any) -> list | None:
        with self._watchdog.during(self._watchdog.grid.world, "gather"):
            return self._comm.gather(value)

    def bcast(self, value: Any) -> Any:
        with self._watchdog.during(self._watchdog.grid.world, "bcast"):
            return self._comm.bcast(value)

    def send(self, value: Any, dest: int, tag: int) -> None:
        with self._watchdog.during(self._watchdog.grid.world, "send"):
            self._comm.send(value, dest, tag)

    def recv(self, source: int, tag: int) -> Any:
        with self._watchdog.during(self._watchdog.grid.world, "recv"):
            return self._comm.recv(source=source, tag=tag)


def abort(comm: MPI.Intracomm) -> None:
    """End the job, from a thread beside one that is inside MPI."""
    from mpi4py import MPI

    if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
        comm.Abort(1)
    os._exit(1)  # the launcher ends the others
