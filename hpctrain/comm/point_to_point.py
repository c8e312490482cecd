"""A tensor from one rank of an axis to another, as `comm.collectives` says."""

from __future__ import annotations

import torch

from hpctrain.comm.buffers import Work, deliver, message, reachable, until
from hpctrain.comm.timing import time_call, timed
from hpctrain.grid import Axis


@timed
def send(tensor: torch.Tensor, axis: Axis, dest: int, tag: int = 0) -> None:
    """Send to rank `dest` of the axis; returns when the tensor may be changed. Tags from 16384 on are those of
    `comm` itself."""
    host = reachable(tensor.contiguous(), axis.transport.cuda_aware)
    (axis.comm.Ssend if axis.transport.synchronous else axis.comm.Send)(message(host), dest, tag)
    axis.transport.traffic.add(axis.name, "send", sent=tensor.nbytes)


@timed
def send_start(tensor: torch.Tensor, axis: Axis, dest: int, tag: int = 0) -> Work[None]:
    """Begin to send; the tensor must not be changed before `wait()`."""
    host = reachable(tensor.contiguous(), axis.transport.cuda_aware)
    request = (axis.comm.Issend if axis.transport.synchronous else axis.comm.Isend)(message(host), dest, tag)
    axis.transport.traffic.add(axis.name, "send", sent=tensor.nbytes)
    return Work([request], None, keep=(host,))


@timed
def recv(out: torch.Tensor, axis: Axis, source: int, tag: int = 0) -> torch.Tensor:
    """Receive into `out`, whose shape and dtype are the sender's."""
    return recv_start(out, axis, source, tag).wait()


@timed
def recv_start(out: torch.Tensor, axis: Axis, source: int, tag: int = 0) -> Work[torch.Tensor]:
    host = reachable(out, axis.transport.cuda_aware, copy=False)
    request = axis.comm.Irecv(message(host), source, tag)
    axis.transport.traffic.add(axis.name, "recv", received=out.nbytes)
    return Work([request], out, finish=lambda: deliver(host, out))


def probe(axis: Axis, tag: int = 0) -> int:
    """Wait for a message with this tag from anybody; returns the rank that sent it, for `recv`."""
    return time_call(axis, "probe", _probe, axis, tag)


def _probe(axis: Axis, tag: int) -> int:
    from mpi4py import MPI

    status = MPI.Status()
    until(lambda: axis.comm.Iprobe(MPI.ANY_SOURCE, tag, status))
    return status.source


def arrived(axis: Axis, tag: int = 0) -> int | None:
    """The rank whose message with this tag has come, for `recv`, or None; does not wait."""
    from mpi4py import MPI

    status = MPI.Status()
    return status.source if axis.comm.Iprobe(MPI.ANY_SOURCE, tag, status) else None
