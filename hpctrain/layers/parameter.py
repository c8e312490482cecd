"""Making parameters: only this rank's slice is ever filled, from the numbers that belong to it."""

from __future__ import annotations

import torch

from hpctrain.randomness import Key, fill_slice
from hpctrain.shard import Shard


def parameter(shard: Shard, key: Key, std: float | None, value: float = 0.0, *, dtype=None, device=None):
    """A parameter holding a slice: normal with standard deviation `std`, or constant `value` where std is None."""
    data = torch.empty(shard.shape, dtype=dtype)
    if std is None:
        data.fill_(value)
    else:
        fill_slice(data, shard, lambda start, count: key.normal(start, count) * std)
    made = torch.nn.Parameter(data.to(device))
    made.shard = shard
    return made


class GradientPlace:
    """Where a parameter's gradient is to lie: `view`, a part of a bucket of gradients, kept as `parameter.place`.

    The first product of a step may be written there directly, so that nothing need be copied.
    """

    __slots__ = ("free", "view")

    def __init__(self, view: torch.Tensor):
        self.view, self.free = view, True

    def take(self) -> torch.Tensor | None:
        """A tensor on the place, once a step; autograd takes over only what nobody else holds, so always a new one."""
        if not self.free:
            return None
        self.free = False
        return self.view.view(self.view.shape)


def drawn_key(grid, key: Key | None) -> Key:
    """`key`, or one drawn from torch's default generator on the first rank of the data and tensor axes.

    So `torch.manual_seed` decides the weights, as it does for torch's own layers.
    """
    if key is not None:
        return key
    seed = int(torch.randint(2**62, ()))
    return Key(grid.data.comm.bcast(grid.tensor.comm.bcast(seed)))
