"""What MPI made for grids that nobody uses any more is freed when the next grid is made of the same communicator.

Communicators and windows are freed by all of their ranks together, in one order, and Python drops a grid on one rank
before it does so on another. So a rank only notes that a grid of its is gone; when all make the next one, they agree on
which grids are gone everywhere, and free those.

Open MPI frees the windows that are left at the end of the program in the order of their handles, and each by all its
ranks together. Once some were freed, later ones have their handles, so that ranks with other windows have another order
and wait for each other for ever. So those that are left are freed here, the last made first, before MPI ends.
"""

from __future__ import annotations

import atexit
import functools
import gc
import os
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI

LOOKED = 16  # grids from which on the collector of cycles runs: a watched or parallelized grid is in some


class Holdings:
    """What MPI made for one grid. It knows of what uses it, but keeps none of that alive.

    Attributes: `users`, how many objects there are, such as axes' `Transport` and memory of windows, whose end it
    waits for.
    """

    def __init__(self) -> None:
        self.users = 0
        self._frees: list[Callable[[], None]] = []
        self._windows: list[Callable[[], None]] = []

    def add(self, free: Callable[[], None]) -> None:
        """`free`, which may be called a second time, is collective, and refers to handles of MPI's alone."""
        self._frees.append(free)

    def add_window(self, free: Callable[[], None]) -> None:
        """As `add`, but called at the end of the program too."""
        self._windows.append(free)

    def used_by(self, user: object) -> None:
        self.users += 1
        weakref.finalize(user, self._gone).atexit = False

    def _gone(self) -> None:
        self.users -= 1

    def free(self) -> None:
        """The last made first. Collective."""
        self.free_windows()
        while self._frees:
            self._frees.pop()()

    def free_windows(self) -> None:
        while self._windows:
            self._windows.pop()()


class End:
    """Of this program, which frees windows unless it is after an error of this rank, which no other would wait for.

    Of SystemExit only mpi4py knows then, which aborts all ranks after Python has ended and tells nobody before.
    """

    def __init__(self) -> None:
        from mpi4py import MPI

        self._process, self._status, self._tell = os.getpid(), 0, MPI._set_abort_status
        MPI._set_abort_status = self._note

    def _note(self, status: int) -> None:
        self._status = status
        self._tell(status)

    def free_windows(self, grids: list[Holdings]) -> None:
        from mpi4py import MPI

        failed = self._status or hasattr(sys, "last_type")
        if not failed and os.getpid() == self._process and not MPI.Is_finalized():
            for holdings in reversed(grids):
                holdings.free_windows()


_end = functools.cache(End)


class Freed:
    """In the place of the communicators of a grid that was freed."""

    def __getattr__(self, name: str) -> object:
        raise ValueError(
            "the grid was given back by free() or at the end of its `with`, and nothing of it can be used any more; "
            "make another one by ht.Grid(...)"
        )


def free_comm(comm: MPI.Comm) -> Callable[[], None]:
    """For `Holdings.add`."""
    return functools.partial(_free_comm, comm)


def _free_comm(comm: MPI.Comm) -> None:
    if comm:  # neither null nor freed
        comm.Free()


@functools.cache
def _keyval(create: Callable[[], int]) -> int:
    return create()


class Made(list[Holdings]):
    """Of all grids of a communicator that are not freed, in the order in which they were made.

    Attributes: `looked`, how many there must be for the collector of cycles to run: twice those that were left the last
    time, as it looks at all of Python's objects.
    """

    looked = LOOKED


def made_of(comm: MPI.Intracomm) -> Made:
    """What was made of the communicator; kept with it."""
    key = _keyval(comm.Create_keyval)
    made = comm.Get_attr(key)
    if not isinstance(made, Made):  # none yet
        made = Made()
        comm.Set_attr(key, made)
        atexit.register(_end().free_windows, made)
    return made


def reclaim(comm: MPI.Intracomm) -> None:
    """Free what was made of the communicator for grids that no rank uses any more. Collective."""
    from mpi4py import MPI

    made = made_of(comm)
    if not made:
        return
    if looked := len(made) >= made.looked:
        gc.collect()
    gone = bytearray(not holdings.users for holdings in made)
    comm.Allreduce(MPI.IN_PLACE, [gone, MPI.UNSIGNED_CHAR], MPI.MIN)
    for holdings in [holdings for holdings, is_gone in zip(made, gone) if is_gone]:
        holdings.free()
        made.remove(holdings)
    if looked:
        made.looked = max(LOOKED, 2 * len(made))
