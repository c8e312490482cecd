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

    The first product of a step may be written there directly, so that nothing need be copied, unless the gradients are
    kept in another precision than that of the products (`direct` is False).

    A layer may put off the sum over ranks of a gradient until `last`, the last backward of a step; None once the
    gradient of that one has come. Until then the rank keeps its summand for all of their parts: where z ranks hold a
    weight, z times the memory of the gradient, kept from step to step.
    """

    __slots__ = ("direct", "free", "last", "view", "_over", "_pending", "_whole")

    def __init__(self, view: torch.Tensor, direct: bool = True):
        self.view, self.direct, self.free, self.last = view, direct, direct, False
        self._pending, self._whole, self._over = False, None, None

    def clear(self) -> None:
        """A step begins, of more than one backward unless `last` is set."""
        self.free, self.last, self._pending = self.direct, False, False

    def take(self) -> torch.Tensor | None:
        """A tensor on the place, once a step; autograd takes over only what nobody else holds, so always a new one."""
        if not self.free:
            return None
        self.free = False
        return self.view.view(self.view.shape)

    def put_off(self, a: torch.Tensor, b: torch.Tensor, over) -> None:
        """Keep a @ b, to be summed over the ranks of `over` (`layers.spread.Rows`)."""
        if self._pending:
            self._whole.addmm_(a, b)
        elif self._whole is None:
            self._whole = a @ b
        else:
            torch.mm(a, b, out=self._whole)
        self._pending, self._over = True, over

    def unsummed(self) -> torch.Tensor | None:
        """What was put off, once."""
        pending, self._pending = self._pending, False
        return self._whole if pending else None

    def settle(self) -> torch.Tensor | None:
        """The sum of what was put off, if anything is left of it."""
        return self._over.sum(self.unsummed()) if self._pending else None


def accumulate(parameter: torch.nn.Parameter, gradient: torch.Tensor | None) -> None:
    """Add to the parameter's gradient and call its hooks, as autograd does."""
    if gradient is not None:
        gradient = gradient.to(getattr(parameter, "grad_dtype", None) or parameter.dtype)
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
    for hook in (parameter._post_accumulate_grad_hooks or {}).values():
        hook(parameter)


def drawn_key(grid, key: Key | None) -> Key:
    """`key`, or one drawn from torch's default generator on the first rank of the data and tensor axes.

    So `torch.manual_seed` decides the weights, as it does for torch's own layers.
    """
    if key is not None:
        return key
    seed = int(torch.randint(2**62, ()))
    return Key(grid.data.comm.bcast(grid.tensor.comm.bcast(seed)))
