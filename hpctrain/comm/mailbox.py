"""Messages from any rank of an axis, taken as they come: what is sent to whom is not known beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hpctrain.comm.buffers import Work, until
from hpctrain.comm.point_to_point import arrived, recv, recv_start, send_start
from hpctrain.comm.timing import timed_method
from hpctrain.grid import Axis

_HEADER, _PAYLOAD = 0, 1  # tags; MPI keeps the order of those from one rank, so that they stay pairs
MOST_NUMBERS, MOST_DIMS = 20, 8
_LENGTH = 3 + MOST_NUMBERS + MOST_DIMS
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.bool,
)  # fmt: skip


class Letter(NamedTuple):
    """Whole numbers, at most MOST_NUMBERS, and a tensor of any shape or None."""

    numbers: tuple[int, ...]
    payload: torch.Tensor | None


class Mailbox:
    """This rank's letters to and from the others of an axis. Nothing here waits for a rank to send or to receive but
    `recv_any`, and that receives whatever comes, so that ranks which send to each other cannot wait for each other.

    A letter is a header of _LENGTH int64 (numbers, dims and dtype), and the tensor's own memory as a second message.
    With `axis.transport.synchronous` both are sent by MPI_Issend: none is buffered, and none is done before it is
    received.

    Args:
        axis: along which nothing else is sent by tags 0 and 1 while letters are under way.
        device: of arriving tensors.
    """

    def __init__(self, axis: Axis, device: torch.device | None = None):
        self.axis, self.device = axis, device
        self._leaving: list[Work[None]] = []
        self._arriving: list[tuple[Letter, Work[torch.Tensor] | None]] = []

    def post(self, dest: int, numbers: Sequence[int], payload: torch.Tensor | None = None) -> None:
        """Begin to send; the payload must not be changed any more."""
        header = _header(numbers, payload)
        self._leaving.append(send_start(header, self.axis, dest, _HEADER))
        if payload is not None:
            self._leaving.append(send_start(payload, self.axis, dest, _PAYLOAD))

    def poll(self) -> list[Letter]:
        """The letters that have come, in the order in which they began to; does not wait."""
        self._leaving = [work for work in self._leaving if not work.test()]
        while (source := arrived(self.axis, _HEADER)) is not None:
            header = recv(torch.empty(_LENGTH, dtype=torch.int64), self.axis, source, _HEADER)
            letter = self._letter(header.tolist())
            payload = letter.payload
            self._arriving.append(
                (letter, None if payload is None else recv_start(payload, self.axis, source, _PAYLOAD))
            )
        found: list[Letter] = []
        rest: list[tuple[Letter, Work[torch.Tensor] | None]] = []
        for letter, work in self._arriving:
            if work is None or work.test():
                if work is not None:
                    work.wait()
                found.append(letter)
            else:
                rest.append((letter, work))
        self._arriving = rest
        return found

    @timed_method
    def recv_any(self) -> list[Letter]:
        """At least one letter; waits for it."""
        return until(self.poll)

    def finish(self) -> None:
        """Wait until everything posted has been received or, where MPI buffers it, has left."""
        for work in self._leaving:
            work.wait()
        self._leaving = []

    def _letter(self, header: list[int]) -> Letter:
        count, dims, dtype = header[:3]
        numbers = tuple(header[3 : 3 + count])
        if dims < 0:
            return Letter(numbers, None)
        shape = header[3 + MOST_NUMBERS : 3 + MOST_NUMBERS + dims]
        return Letter(numbers, torch.empty(shape, dtype=_DTYPES[dtype], device=self.device))


def _header(numbers: Sequence[int], payload: torch.Tensor | None) -> torch.Tensor:
    if len(numbers) > MOST_NUMBERS:
        raise ValueError(f"a letter has at most {MOST_NUMBERS} numbers, got {len(numbers)}")
    dims, dtype, shape = -1, 0, torch.Size()
    if payload is not None:
        if payload.dtype not in _DTYPES or payload.dim() > MOST_DIMS:
            raise ValueError(
                f"a tensor of {payload.dtype} with {payload.dim()} dims cannot be sent; use at most {MOST_DIMS} dims "
                "and a real dtype"
            )
        dims, dtype, shape = payload.dim(), _DTYPES.index(payload.dtype), payload.shape
    padded = [*numbers] + [0] * (MOST_NUMBERS - len(numbers)) + [*shape] + [0] * (MOST_DIMS - len(shape))
    return torch.tensor([len(numbers), dims, dtype, *padded])
