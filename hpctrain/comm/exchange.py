"""Messages between all pairs of ranks of an axis, of which most collectives are made."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hpctrain.comm.buffers import Work, deliver, message, reachable
from hpctrain.grid import Axis

if TYPE_CHECKING:
    import torch

# These messages have a tag of their own; callers of `send` and `recv` use lower ones. 32767 is the largest that every
# MPI allows.
TAG = 32767


def exchange(
    axis: Axis,
    name: str,
    tensor: torch.Tensor,
    sends: Sequence[int],
    out: torch.Tensor,
    receives: Sequence[int],
    same: bool = False,
    then: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Work[torch.Tensor]:
    """Begin to send sends[r] elements of `tensor` to each rank r, and to receive receives[r] into `out`, both in order.

    With `same`, every rank is sent the same elements, from the start of `tensor`. `then` makes the result from `out`.
    """
    size, rank = axis.size, axis.rank
    give = reachable(tensor, axis.transport.cuda_aware)
    take = reachable(out, axis.transport.cuda_aware, copy=False)
    given = (0,) * size if same else tuple(itertools.accumulate(sends, initial=0))
    taken = tuple(itertools.accumulate(receives, initial=0))
    requests = []
    for step in range(1, size):
        source = (rank - step) % size
        if receives[source]:
            part = message(take, taken[source], receives[source])
            requests.append(axis.comm.Irecv(part, source, TAG))
    for step in range(1, size):
        dest = (rank + step) % size
        if sends[dest]:
            requests.append(axis.comm.Isend(message(give, given[dest], sends[dest]), dest, TAG))
    if receives[rank]:
        kept = give.view(-1).narrow(0, given[rank], sends[rank])
        take.view(-1).narrow(0, taken[rank], receives[rank]).copy_(kept)
    sent, received = sum(sends) - sends[rank], sum(receives) - receives[rank]
    axis.transport.traffic.add(axis.name, name, sent * tensor.itemsize, received * tensor.itemsize)

    def finish() -> torch.Tensor:
        deliver(take, out)
        return out if then is None else then(out)

    return Work(requests, out, finish, keep=(give,))
