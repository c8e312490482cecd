"""Memory that all ranks of a node can reach: MPI-3 shared-memory windows.

A sum over ranks of one node needs no messages. Each rank adds up its slice of everybody's tensor, reading and writing
the others' memory in place: every byte is read once and written once, where a message is copied at both ends.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import math
import mmap
import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch

from hpctrain.comm.buffers import REDUCED_HERE, Work
from hpctrain.grid import Axis

if TYPE_CHECKING:
    from mpi4py import MPI

R = TypeVar("R")

SHARED_MEMORY = "/dev/shm"  # where MPI keeps it on Linux
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14


class Window:
    """`nbytes` of memory on every rank of an axis, any number of them, all within every rank's reach.

    Its creation is collective, and so is `free`, after which nothing may read its tensors. A grid frees those that are
    left. A window takes a context of MPI's, and 0.4 ms to make; 2,000 of them take 0.75 s, 6,000 take 13: one is made
    for a bucket of gradients or weights, up to four for the workspaces of an axis, and two for one of a strategy.

    Attributes: `parts`, uint8, every rank's memory in rank order; `whole`, all of it as one.

    Raises:
        OSError: on every rank, where the node has too little of it left.
    """

    def __init__(self, axis: Axis, nbytes: int):
        from mpi4py import MPI

        nbytes = nbytes or (16 if axis.rank == 0 else 0)  # MPI wants a byte
        sizes = _check_space(axis, nbytes)
        self.axis = axis
        self._released: Work[None] | None = None
        self._barrier, self._ibarrier = axis.comm.Barrier, axis.comm.Ibarrier
        self._window = MPI.Win.Allocate_shared(nbytes, 1, comm=axis.comm)
        self._window.Lock_all()  # the epoch in which loads, stores and Sync are defined
        first = self._window.Shared_query(0)[0].address  # MPI lays the ranks' parts side by side
        memory = (ctypes.c_char * sum(sizes)).from_address(first)  # alive as long as any tensor in it
        axis.transport.holdings.used_by(memory)
        self._waited: list[MPI.Request] = []
        axis.transport.holdings.add_window(functools.partial(_free, self._window, self._waited))
        self.whole = torch.frombuffer(memory, dtype=torch.uint8)
        self.parts = self.whole.split(sizes)
        if not all(axis.comm.allgather(_populate(self.parts[axis.rank]))):
            self.free()
            raise _no_space(axis, sum(sizes), *_space())
        axis.transport.resources.append(self)

    def free(self) -> None:
        self.wait_released()
        del self.whole, self.parts
        _free(self._window, self._waited)

    def memory_barrier(self) -> None:
        """What this rank wrote, others see after a message from it; what they wrote, this one after theirs."""
        self._window.Sync()

    def barrier(self) -> None:
        """What any rank wrote before, every rank sees after."""
        self._window.Sync()
        self._barrier()
        self._window.Sync()

    def patient_barrier(self) -> None:
        """The same where ranks may come late: their cores are left to others meanwhile."""
        self.barrier_start(lambda: None).wait()

    def barrier_start(self, then: Callable[[], R]) -> Work[R]:
        """Begin a barrier. `wait()` completes it and returns `then()`, which sees what any rank wrote before."""
        self._window.Sync()

        def finish() -> R:
            self._window.Sync()
            return then()

        self._waited[:] = [self._ibarrier()]
        return Work(list(self._waited), None, finish)

    def release(self) -> None:
        """This rank has done with what is in the window."""
        self.wait_released()
        self._released = self.barrier_start(lambda: None)
        self._released.owner = self.axis, "release", None

    def wait_released(self) -> None:
        """Until every rank has done with it, where they say so."""
        if self._released is not None:
            self._released.wait()
            self._released = None


def _free(window: MPI.Win, waited: list[MPI.Request]) -> None:
    """Of a window that is not freed yet, when nothing reads its memory any more."""
    for request in waited:
        request.Wait()
    if window:
        window.Unlock_all()
        window.Free()


def _check_space(axis: Axis, nbytes: int) -> list[int]:
    """Every rank's number of bytes, once they are known to fit: MPI itself fails on some ranks and hangs on others."""
    reported = axis.comm.allgather((nbytes, *_space()))
    sizes = [size for size, *_ in reported]
    _, free, host = min(reported, key=lambda each: each[1])
    if sum(sizes) > free:
        raise _no_space(axis, sum(sizes), free, host)
    return sizes


def _space() -> tuple[float, str]:
    """Bytes free for shared memory, and where."""
    try:
        found = os.statvfs(SHARED_MEMORY)
    except OSError:  # this system keeps it elsewhere
        return math.inf, socket.gethostname()
    return found.f_bavail * found.f_frsize, socket.gethostname()


def _no_space(axis: Axis, nbytes: int, free: float, host: str) -> OSError:
    return OSError(
        errno.ENOSPC,
        f"{nbytes / 1e6:.1f} MB of shared memory for the {axis.size} ranks of {axis.name} do not fit: {SHARED_MEMORY} "
        f"of {host} has {free / 1e6:.1f} MB free. Enlarge it (mount -o remount,size=SIZE {SHARED_MEMORY}; for "
        "containers --shm-size SIZE), or start fewer ranks on a node",
    )


def _populate(part: torch.Tensor) -> bool:
    """Have the system provide the memory now: where it cannot, a later write would end the rank by SIGBUS."""
    start = part.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    length = part.data_ptr() + part.numel() - start
    failed = libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _POPULATE_WRITE)
    return not failed or ctypes.get_errno() in (errno.EINVAL, errno.ENOSYS)  # an older system cannot tell


def add_up(parts: list[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """The sum of parts, in order, written to `out`, which may be one of them; 16-bit floats are summed in float32."""
    first, *rest, last = parts
    if last.dtype in REDUCED_HERE:
        first = first.float()
    elif rest:
        first = first + rest.pop(0)
    for part in rest:
        first += part
    return torch.add(first, last, out=out) if first.dtype == out.dtype else out.copy_(first.add_(last))
