"""All ranks decide alike: an error on one rank becomes the same error on every rank."""

from __future__ import annotations

import contextlib

from hpctrain.comm.watch import PATIENCE, Watched


class RemoteError(RuntimeError):
    """Another rank failed; the message names it."""


def agree(comm, error: BaseException | None) -> None:
    """Raise on every rank of `comm` (mpi4py) when any rank brings an error; the lowest such rank's error is reported.

    The error's own type is kept where it is ValueError or OSError, so that callers can tell a user's mistake. What is
    waited for here is the others' own work, such as writing a file, and the watchdog knows that.
    """
    told = None if error is None else (type(error).__name__, str(error), isinstance(error, (ValueError, OSError)))
    all_told = comm.allgather(told, PATIENCE) if isinstance(comm, Watched) else comm.allgather(told)
    for rank, other in enumerate(all_told):
        if other is None:
            continue
        name, text, expected = other
        if rank == comm.rank:
            raise error
        if expected:
            raise ValueError(text) from error
        raise RemoteError(f"rank {rank}: {name}: {text}") from error


@contextlib.contextmanager
def together(comm):
    """The block runs on every rank of `comm`; if it fails on one of them, all leave it with an error.

    The block itself must not communicate.
    """
    error = None
    try:
        yield
    except Exception as caught:
        error = caught
    agree(comm, error)
