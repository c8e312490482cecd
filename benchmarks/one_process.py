"""One process with as many threads as an MPI job has ranks, on all of the machine's cores."""

import contextlib
import os

import torch
from mpi4py import MPI


@contextlib.contextmanager
def all_cores():
    """Within it this rank has them; mpirun binds it to its own, and with it the threads that it makes."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    torch.set_num_threads(MPI.COMM_WORLD.size)
    try:
        yield
    finally:
        torch.set_num_threads(1)
        os.sched_setaffinity(0, own)
