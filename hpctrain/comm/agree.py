"""All ranks decide alike: an error on one rank becomes an error of the same text on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hpctrain.comm.objects import all_gather_object
from hpctrain.comm.watchdog import PATIENCE, WatchedComm
from hpctrain.grid import Axis

if TYPE_CHECKING:
    from mpi4py import MPI


class RemoteError(RuntimeError):
    """Another rank failed; the message names it."""


def agree(comm: MPI.Intracomm | WatchedComm | Axis, error: BaseException | None) -> None:
    """Raise on every rank of `comm` when any rank brings an error; the lowest such rank's error is reported.

    That rank raises its own error. The others raise a ValueError of its text where it is a ValueError or an OSError, as
    a user's mistake gives, and a RemoteError otherwise. What is waited for here is the others' own work, such as
    writing a file, and the watchdog knows that; a plain mpi4py communicator is not watched.
    """
    failure = None if error is None else (type(error).__name__, str(error), isinstance(error, (ValueError, OSError)))
    if isinstance(comm, Axis):
        failures = all_gather_object(failure, comm, PATIENCE)
    else:
        failures = comm.allgather(failure, PATIENCE) if isinstance(comm, WatchedComm) else comm.allgather(failure)
    for rank, other in enumerate(failures):
        if other is None:
            continue
        name, text, expected = other
        if rank == comm.rank and error is not None:
            raise error
        if expected:
            raise ValueError(text) from error
        raise RemoteError(f"rank {rank}: {name}: {text}") from error


@contextlib.contextmanager
def together(comm: MPI.Intracomm | WatchedComm | Axis) -> Iterator[None]:
    """The block runs on every rank of `comm`; if it fails on one of them, all leave it with an error.

    The block itself must not communicate.
    """
    error = None
    try:
        yield
    except Exception as caught:
        error = caught
    agree(comm, error)


def check_started_alike(comm: MPI.Intracomm | WatchedComm, given: dict[str, Any]) -> None:
    """Ranks that were started with other values would wait for each other somewhere.

    Args:
        comm: communicator (mpi4py), over which this is collective.
        given: values by name; those that decide which names follow come first.

    Raises:
        ValueError: on every rank, naming the first value that differs.
    """
    first = comm.bcast(given)
    with together(comm):
        for name, value in given.items():
            mine, others = repr(value), repr(first[name])  # in which nan is nan
            if mine != others:
                raise ValueError(
                    f"rank {comm.rank} was started with {name} = {mine}, and rank 0 with {others}; start all"
                    " ranks alike"
                )
