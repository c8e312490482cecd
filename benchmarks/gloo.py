"""torch.distributed over gloo in the processes of an MPI job, for the peers."""

import contextlib
import os
import socket

import torch.distributed as dist
from mpi4py import MPI


@contextlib.contextmanager
def gloo():
    """All ranks of the job in torch's default group."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    world = MPI.COMM_WORLD
    store = dist.TCPStore("127.0.0.1", world.bcast(_free_port()), world.size, world.rank == 0)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
