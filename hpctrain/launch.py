"""How a rank's process begins and ends: its launcher, its threads, a user's mistake, and a failure that ends all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import sys
import termios
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from hpctrain import cores

if TYPE_CHECKING:
    from mpi4py import MPI

USAGE_ERROR = 2
READ_WITHIN = 5.0  # seconds that a launcher may take to read what a rank said
MOMENT = 0.2  # seconds that it is given where nobody can tell


def check_launcher(size: int) -> None:
    """Raise where the launcher of one MPI started the library of another, which gives worlds of one rank each."""
    names = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS"]
    if os.environ.get("SLURM_TASK_PID") == str(os.getpid()):  # else started by a shell in a step, where it may be alone
        names.append("SLURM_STEP_NUM_TASKS")
    started = next(filter(None, map(os.environ.get, names)), None)
    if started and int(started) > 1 and size == 1:
        raise RuntimeError(
            f"the launcher started {started} ranks, but MPI sees one: mpirun and the MPI library that mpi4py loaded "
            "are of different makes; use the launcher that belongs to the library (`python -m mpi4py "
            "--mpi-lib-version`), or the --mpi of srun that it knows (`srun --mpi=list`); for runs of one rank each by "
            "srun, unset SLURM_TASK_PID"
        )


def limit_threads() -> None:
    """Without OMP_NUM_THREADS, share the node's cores among its ranks; every rank taking all of them is slow."""
    if not os.environ.get("OMP_NUM_THREADS"):
        ranks = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or os.environ.get("MPI_LOCALNRANKS") or "1"
        os.environ["OMP_NUM_THREADS"] = str(cores.find().share(int(ranks))[0])


def complain(error: Exception, rank: int = 0, status: int = USAGE_ERROR) -> int:
    """Say a user's mistake once, on rank 0; returns the exit status."""
    if rank == 0:
        print(f"hpctrain: error: {error}", file=sys.stderr, flush=True)
    return status


def end(world: MPI.Comm, status: int) -> int:
    """Return the exit status, one other than 0 on no rank before the launcher has read what every rank said: at the
    first rank that ends so it ends the job, and what it has not read by then may be lost. Collective then; a rank that
    is alone with its error waits no longer than READ_WITHIN for the others."""
    if status:
        wait_until_read()
        _wait_for(world.Ibarrier().Test)
    return status


def wait_until_read() -> None:
    """Until the launcher has read what this rank has written, or READ_WITHIN is over.

    A pipe tells what is left in it; the terminal that Open MPI puts in the place of standard output does not, and is
    given a MOMENT.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody reads it
            stream.flush()
    pipes = [file for file in (1, 2) if stat.S_ISFIFO(os.fstat(file).st_mode)]
    _wait_for(lambda: not any(map(_unread, pipes)))
    if os.isatty(1) or os.isatty(2):
        time.sleep(MOMENT)


def _wait_for(done: Callable[[], bool]) -> None:
    limit = time.monotonic() + READ_WITHIN
    while not done() and time.monotonic() < limit:
        time.sleep(0.001)


def _unread(pipe: int) -> int:
    """Bytes, by its writing end."""
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def abort(world: MPI.Comm, error: Exception | None = None) -> NoReturn:
    """End all ranks, after this one's traceback, or an error that says all. Waiting would hang: the others are in a
    collective without it."""
    if error:
        complain(error)
    else:
        print(f"hpctrain: rank {world.rank} of {world.size} failed:", file=sys.stderr)
        traceback.print_exc()
    try:
        wait_until_read()
    finally:
        world.Abort(1)
