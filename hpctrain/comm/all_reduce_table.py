"""Which algorithm sums what: the one table of `comm.all_reduce`."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

Names = TypeVar("Names", str, tuple[str, ...])


class Choice(NamedTuple, Generic[Names]):
    """What sums
    a tensor that the caller brings,
    an `AllReduceBuffer` in host memory on an axis of one node, and
    any other `AllReduceBuffer`.
    """

    tensor: Names
    node_buffer: Names
    buffer: Names


# "mpi" is an MPI_Allreduce; "prepared" is one whose arguments were made with the buffer, of host memory and a type that
# MPI can add; "shared" adds up in shared memory. All else are in comm/algorithms.
CHOICES: dict[str, Choice[str]] = {
    "shared": Choice("mpi", "shared", "prepared"),
    "mpi": Choice("mpi", "prepared", "prepared"),
    "naive": Choice("naive", "naive", "naive"),
    "ring": Choice("ring", "ring", "ring"),
    "direct": Choice("direct", "direct", "direct"),
    "rabenseifner": Choice("rabenseifner", "rabenseifner", "rabenseifner"),
    "hierarchical": Choice("hierarchical", "shared", "hierarchical"),
}
DEFAULT = CHOICES["shared"]

# "auto" takes the fastest of these.
_MESSAGES = ("naive", "ring", "direct", "rabenseifner", "hierarchical", "mpi")
CANDIDATES: Choice[tuple[str, ...]] = Choice(_MESSAGES, (*_MESSAGES, "prepared", "shared"), (*_MESSAGES, "prepared"))
