"""What MPI is given for a tensor: its address, an MPI datatype it may be trusted with, and memory it can reach.

Passing the address costs 2 µs a call where DLPack costs 15, but then nothing else checks layout, type or lifetime:
it is done here, once.

MPI knows no streams. All memory of tensors reaches it by `message`, which waits for the work queued on the current
stream: an addition that is only queued when MPI overwrites its summand gives a wrong sum, and nobody is told. So what
`message` gives is for the call that it is made for, not for a later one, but for CPU tensors. What MPI has received may
be used without waiting.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast, overload

import torch

from hpctrain.grid import Axis

if TYPE_CHECKING:
    from mpi4py import MPI

R = TypeVar("R")
S = TypeVar("S")

MAX_COUNT = 2**31 - 1  # elements of one message: MPI-3 counts are C ints


@functools.cache
def datatypes() -> dict[torch.dtype, MPI.Datatype]:
    """MPI datatype of each torch dtype. 16-bit floats travel as 2-byte integers and are never reduced by MPI:
    a sum of bfloat16 as MPI.SHORT is silently garbage, and MPI has no portable float16."""
    from mpi4py import MPI

    return {
        torch.float32: MPI.FLOAT,
        torch.float64: MPI.DOUBLE,
        torch.float16: MPI.UINT16_T,
        torch.bfloat16: MPI.UINT16_T,
        torch.int8: MPI.INT8_T,
        torch.int16: MPI.INT16_T,
        torch.int32: MPI.INT32_T,
        torch.int64: MPI.INT64_T,
        torch.uint8: MPI.UINT8_T,
        torch.bool: MPI.UINT8_T,
    }


OPERATIONS = ("sum", "max", "min")
REDUCED_BY_MPI = frozenset({torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8})
REDUCED_HERE = frozenset({torch.float16, torch.bfloat16})  # summed in float32


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums, means and norms of such numbers are taken in: float32 for 16-bit floats, else their own dtype."""
    return torch.float32 if dtype in REDUCED_HERE else dtype


@functools.cache
def _fromaddress() -> Callable[[int, int], MPI.buffer]:
    from mpi4py import MPI

    return MPI.buffer.fromaddress


def message(tensor: torch.Tensor, start: int = 0, count: int | None = None) -> list:
    """[memory, datatype] for `count` elements, all by default, of a contiguous tensor that MPI can reach.

    On return the work queued on the tensor's current stream is done, so that MPI may read and write it at once.
    Elements are named by their row-major index, since making a view of a tensor costs more than sending a small one.
    """
    datatype = datatypes().get(tensor.dtype)
    if datatype is None:
        raise ValueError(f"tensors of {tensor.dtype} cannot be sent; convert it to one of {_names(datatypes())}")
    check_contiguous(tensor)
    if count is None:
        count = tensor.numel()
    if not tensor.is_cpu:
        torch.cuda.current_stream(tensor.device).synchronize()
    size = tensor.itemsize
    memory = _fromaddress()(tensor.data_ptr() + start * size, count * size)
    if count <= MAX_COUNT:
        return [memory, datatype]
    return [memory, 1, large_datatype(tensor.dtype, count, MAX_COUNT)]


def check_contiguous(tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is not contiguous; pass tensor.contiguous()")


@functools.lru_cache(maxsize=256)
def large_datatype(dtype: torch.dtype, elements: int, limit: int) -> MPI.Datatype:
    """One datatype that spans more elements than an MPI count can say."""
    from mpi4py import MPI

    base = datatypes()[dtype]
    whole, rest = divmod(elements, limit)
    many = base.Create_contiguous(limit).Create_contiguous(whole)
    tail = base.Create_contiguous(rest)
    return MPI.Datatype.Create_struct([1, 1], [0, whole * limit * dtype.itemsize], [many, tail]).Commit()


def check_reducible(dtype: torch.dtype, op: str) -> None:
    if op not in OPERATIONS:
        raise ValueError(
            f'op must be "sum", "max" or "min", got {op!r}; do others to what comm.all_gather gives of all ranks'
        )
    if dtype in REDUCED_BY_MPI or (dtype in REDUCED_HERE and op == "sum"):
        return
    raise ValueError(
        f"cannot take the {op} of {dtype} tensors across ranks; "
        f"use one of {_names(REDUCED_BY_MPI)}, or {_names(REDUCED_HERE)} for a sum"
    )


@functools.cache
def operation(op: str) -> MPI.Op:
    from mpi4py import MPI

    return getattr(MPI, op.upper())


@functools.cache
def in_place() -> MPI.InPlaceType:
    from mpi4py import MPI

    return MPI.IN_PLACE


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


# Staging ---------------------------------------------------------------------------------------------------------


def reachable(tensor: torch.Tensor, direct: bool, copy: bool = True) -> torch.Tensor:
    """Memory that MPI can use in place of `tensor`, which is contiguous: the tensor itself where MPI can reach it.

    A CUDA tensor that MPI cannot be given directly is replaced by pinned host memory, filled on return when `copy`.
    """
    if tensor.is_cpu or direct:
        return tensor
    host = pinned_like(tensor)
    if copy:
        host.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream(tensor.device).synchronize()
    return host


def deliver(host: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Bring what arrived in `host` to `tensor`, for which `reachable` gave it."""
    if host is not tensor:
        tensor.copy_(host)  # blocking: the pinned memory goes back to its pool after this
    return tensor


def pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    """Pinned host memory of the tensor's shape, from CuPy's pool (to which it returns when the result is dropped), or
    from torch's where there is no CuPy, as on ROCm."""
    try:
        import cupy
    except ImportError:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    pool_memory = cupy.cuda.alloc_pinned_memory(max(1, tensor.nbytes))
    flat = torch.frombuffer(pool_memory, dtype=torch.uint8, count=max(1, tensor.nbytes))
    return flat[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def until(look: Callable[[], R]) -> R:
    """What `look` gives once it gives something; leaves the core to others when that takes long.

    An MPI that spins costs whoever shares the core: the other hardware thread, a rank or thread where there are more of
    them than cores. After a millisecond we sleep, each time a sixteenth of what was waited so far, so that at most that
    is lost, and never more than 10 ms.
    """
    if found := look():
        return found
    start = perf_counter()
    while not (found := look()):
        waited = perf_counter() - start
        if waited > 1e-3:
            sleep(min(waited / 16, 0.01))
    return found


def wait(request: MPI.Request) -> None:
    """MPI_Wait, by `until`."""
    until(request.Test)


class Work(Generic[R]):
    """A transfer under way; `wait()` completes it and returns the result: as a rule the received tensor. The buffers
    stay alive until it is complete, also where nobody keeps the `Work`.

    `finish` is called once all messages are done; what it returns is the result, in place of `result`.
    """

    __slots__ = ("_finish", "_keep", "_requests", "_result", "owner")

    @overload
    def __init__(self, requests: list[MPI.Request], result: R, finish: None = None, keep: tuple = ()): ...
    @overload
    def __init__(self, requests: list[MPI.Request], result: object, finish: Callable[[], R], keep: tuple = ()): ...
    def __init__(
        self,
        requests: list[MPI.Request],
        result: Any,
        finish: Callable[[], R] | None = None,
        keep: tuple = (),
    ):
        self._requests, self._result, self._finish, self._keep = requests, result, finish, keep
        # (axis, name of the operation, the one other rank or None), set by `timed`
        self.owner: tuple[Axis, str, int | None] | None = None

    def __del__(self) -> None:
        if self.owner is None or not any(self._requests):
            return
        unfinished = self.owner[0].transport.unfinished
        unfinished[:] = [work for work in unfinished if not work.test()]
        unfinished.append(self)

    def test(self) -> bool:
        """Let MPI progress; True once all messages are done (`wait` must still be called)."""
        return all([request.Test() for request in self._requests])

    def wait(self) -> R:
        if self.owner is None or self.owner[0].transport.traffic.timing:
            return self._wait()
        axis, name, peer = self.owner
        traffic, watchdog = axis.transport.traffic, axis.transport.watchdog
        traffic.timing = True  # operations that make the result are part of this one
        trace = axis.transport.trace
        before = traffic.moved() if trace is not None else (0, 0)
        start = perf_counter()
        if watchdog is not None:
            watchdog.begin(axis, f"{name} wait", peer)
        try:
            return self._wait()
        finally:
            traffic.timing = False
            traffic.add_seconds(axis.name, f"{name} wait", perf_counter() - start)
            if watchdog is not None:
                watchdog.end()
            if trace is not None:
                trace.add_operation(f"{name} wait {axis.name}", peer, start, before, traffic.moved())

    def _wait(self) -> R:
        for request in self._requests:
            wait(request)
        if self._finish is not None:
            self._result = self._finish()
        self._requests, self._finish, self._keep = [], None, ()
        return self._result

    def then(self, further: Callable[[R], S]) -> Work[S]:
        """`further`, given the result, makes the result."""
        finish, result = self._finish, self._result
        longer = cast("Work[S]", self)  # the same transfer, to another result
        longer._finish = lambda: further(result if finish is None else finish())
        return longer


@overload
def done() -> Work[None]: ...
@overload
def done(result: R) -> Work[R]: ...
def done(result: object = None) -> Work:
    return Work([], result)
