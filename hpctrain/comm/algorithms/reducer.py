"""Which algorithm sums tensors over an axis."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch

from hpctrain.choices import ALL_REDUCE, ALL_REDUCE_ALIASES, check_choice
from hpctrain.comm.algorithms.by_messages import SEGMENT, Link, direct, naive, rabenseifner, ring
from hpctrain.comm.algorithms.hierarchical import Hierarchy
from hpctrain.comm.all_reduce_buffer import AllReduceBuffer
from hpctrain.comm.all_reduce_table import CANDIDATES, CHOICES
from hpctrain.comm.buffers import REDUCED_HERE, Work, check_contiguous, deliver, done, reachable, wait
from hpctrain.comm.objects import all_gather_object
from hpctrain.comm.reductions import all_reduce_by_mpi, all_reduce_by_mpi_start
from hpctrain.grid import Axis
from hpctrain.traffic import Traffic

if TYPE_CHECKING:
    from mpi4py import MPI

BY_MESSAGES = {"naive": naive, "ring": ring, "direct": direct, "rabenseifner": rabenseifner}
KEEPS_16_BITS = ("naive", "direct")  # each sum is rounded once, where it ends; in the others partial sums travel

# Algorithms started one after another may be under way at once: each has a tag of its own. Above those of other users.
_FIRST_TAG, _TAGS = 16384, 8192

MEASURED = tuple(1024 * 4**k for k in range(7))  # bytes, 1 KiB to 4 MiB


def choose_all_reduce(axis: Axis, name: str) -> None:
    """Let sums over this axis be taken by an algorithm of `hpctrain.choices.ALL_REDUCE`, or an alias.
    Collective.

    All of them give every rank the same bits. All but "mpi", "ring" and "auto" add in an order that does not depend on
    an element's place in the tensor, so that gradients have the same bits for any size of the buckets. "shared", which
    every axis begins with, sums gradients in shared memory where the axis is on one node, and all else by MPI. What is
    made for the axis before, such as the buckets of `DataParallel`, stays where it is.

    Raises:
        ValueError: on every rank, for a name that is none, or that is not that of all ranks.
    """
    names = all_gather_object(name, axis)
    if len({*names}) > 1:
        raise ValueError(f"all ranks of {axis.name} must choose one algorithm, got by rank {', '.join(names)}")
    if name == "shared":
        axis.transport.reducers.pop(axis, None)
    else:
        axis.transport.reducers[axis] = Reducer(axis, name)


class Reducer:
    """Sums over an axis by one algorithm, or by the fastest for the size: see `choose_all_reduce`.

    CUDA tensors are staged through pinned host memory, except by MPI's own.

    Attributes: `table`, for "auto": {bytes: {algorithm: seconds}} as measured when this was made, of the slowest rank,
    so that all ranks choose alike.
    """

    def __init__(self, axis: Axis, name: str):
        name = ALL_REDUCE_ALIASES.get(name, name)
        check_choice("comm.all_reduce", name, ALL_REDUCE)
        self.axis, self.name, self._turn = axis, name, 0
        self._hierarchy = Hierarchy(axis) if name in ("hierarchical", "auto") else None
        self._choice = CHOICES.get(name)  # None for "auto"
        self._fastest: dict[tuple, str] = {}
        self.table = self._measured() if name == "auto" and axis.size > 1 else {}

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace `tensor` by the sum."""
        algorithm = self.for_tensor(tensor.nbytes)
        return all_reduce_by_mpi(tensor, self.axis) if algorithm == "mpi" else self._finished(algorithm, tensor)

    def all_reduce_start(self, tensor: torch.Tensor) -> Work[torch.Tensor]:
        """Begin to; in shared memory it is done on return."""
        algorithm = self.for_tensor(tensor.nbytes)
        return all_reduce_by_mpi_start(tensor, self.axis) if algorithm == "mpi" else self._start(algorithm, tensor)

    def for_tensor(self, nbytes: int) -> str:
        """The algorithm for a tensor of this size, by the table."""
        return self._choice.tensor if self._choice else self._measured_best(nbytes, CANDIDATES.tensor)

    def for_buffer(self, nbytes: int, one_node: bool) -> str:
        """The algorithm for an `AllReduceBuffer` of this size, by the table."""
        if self._choice:
            return self._choice.node_buffer if one_node else self._choice.buffer
        return self._measured_best(nbytes, CANDIDATES.node_buffer if one_node else CANDIDATES.buffer)

    def _measured_best(self, nbytes: int, candidates: tuple[str, ...]) -> str:
        if (nbytes, candidates) not in self._fastest:
            times = self.table[max((size for size in self.table if size <= nbytes), default=min(self.table))]
            self._fastest[nbytes, candidates] = min((n for n in times if n in candidates), key=times.__getitem__)
        return self._fastest[nbytes, candidates]

    def _finished(self, algorithm: str, tensor: torch.Tensor) -> torch.Tensor:
        return self._start(algorithm, tensor).wait()

    def _start(self, algorithm: str, tensor: torch.Tensor) -> Work[torch.Tensor]:
        check_contiguous(tensor)
        axis = self.axis
        self._turn = (self._turn + 1) % _TAGS
        wide = tensor.float() if tensor.dtype in REDUCED_HERE and algorithm not in KEEPS_16_BITS else tensor
        host = reachable(wide, direct=False)
        if algorithm == "hierarchical" and self._hierarchy is not None:
            axis.transport.traffic.add(
                axis.name, "all_reduce", *self._hierarchy.all_reduce(host.view(-1), _FIRST_TAG + self._turn)
            )
            return done(deliver(host, tensor))
        link = Link(axis, _FIRST_TAG + self._turn)

        def finish() -> torch.Tensor:
            axis.transport.traffic.add(axis.name, "all_reduce", link.sent, link.received)
            return deliver(host, tensor)

        return Running(_in_pieces(BY_MESSAGES[algorithm], host.view(-1), link), finish)

    def _measured(self) -> dict[int, dict[str, float]]:
        """{bytes: {algorithm: seconds}}: the shortest of five times of each, taken in turn, on the slowest rank."""
        axis, hierarchy, table = self.axis, self._hierarchy, dict[int, dict[str, float]]()
        assert hierarchy is not None  # which "auto" has
        counted, axis.transport.traffic = axis.transport.traffic, Traffic()
        for nbytes in MEASURED:
            x = torch.zeros(nbytes // 4)
            sides: dict[str, Callable[[], object]] = {
                name: partial(self._finished, name, x) for name in (*BY_MESSAGES, "hierarchical")
            }
            sides["mpi"] = partial(all_reduce_by_mpi, x, axis)
            names = ("prepared", "shared") if axis.one_node else ("prepared",)
            prepared = {name: AllReduceBuffer(axis, x.numel(), x, name) for name in names}
            sides |= {name: buffer.all_reduce for name, buffer in prepared.items()}
            calls = max(1, min(8, (256 << 10) // nbytes))  # of what takes microseconds, one alone tells little
            times = torch.tensor([[_seconds(axis.comm, call, calls) for call in sides.values()] for _ in range(5)])
            slowest = all_reduce_by_mpi(times.amin(0), axis, "max")
            table[nbytes] = dict(zip(sides, slowest.tolist()))
            for buffer in prepared.values():  # of 8 ranks, all sizes would keep 110 MB of shared memory
                buffer.free()
            hierarchy.free()
        axis.transport.traffic = counted
        return table


def _in_pieces(
    algorithm: Callable[[torch.Tensor, Link], Iterator[list[MPI.Request]]], x: torch.Tensor, link: Link
) -> Iterator[list[MPI.Request]]:
    for piece in x.split(SEGMENT):
        yield from algorithm(piece, link)


class Running(Work[torch.Tensor]):
    """A transfer in several steps: a generator that yields the requests it waits for."""

    __slots__ = ("_steps",)

    def __init__(self, steps: Iterator[list[MPI.Request]], finish: Callable[[], torch.Tensor]):
        super().__init__([], None, finish)
        self._steps = steps
        self.test()

    def test(self) -> bool:
        while super().test():
            requests = next(self._steps, None)
            self._requests = requests or []
            if requests is None:
                return True
        return False

    def _wait(self) -> torch.Tensor:
        requests: list[MPI.Request] | None = self._requests
        while requests is not None:
            for request in requests:
                wait(request)
            requests = next(self._steps, None)
        self._requests = []
        return super()._wait()


def _seconds(comm: MPI.Intracomm, call: Callable[[], object], calls: int) -> float:
    comm.Barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls
