"""Watching what transfers are started, and that each is completed."""

from hpctrain import comm


def started(monkeypatch):
    """A list of the transfers that are started from now on by callers of `hpctrain.comm`."""
    found = []

    def noted(start):
        def call(*args, **options):
            found.append(start(*args, **options))
            return found[-1]

        return call

    for name in ("send_start", "recv_start", "broadcast_start"):
        monkeypatch.setattr(comm, name, noted(getattr(comm, name)))
    return found


def complete(works):
    """Whether each was waited for, or tested and found done: MPI has then put a null request in its place."""
    from mpi4py import MPI

    return all(request == MPI.REQUEST_NULL for work in works for request in work._requests)
