"""Dropout of features or rows of which a rank has some: the masks that one rank would draw for all."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hpctrain import comm
from hpctrain.convert.hooks import check_hooks
from hpctrain.convert.unit_calls import UnitCalls


def kept(
    shape: Sequence[int], p: float, dim: int, part: slice | torch.Tensor, like: torch.Tensor, inplace: bool = False
) -> torch.Tensor:
    """This rank's part along `dim` of a dropout mask of `shape`, booleans: a slice, or int64 numbers.

    Every rank draws the whole mask from torch's generator. So the mask is the one that torch's dropout would have drawn
    without hpctrain, and all ranks' generators stay in the same state.
    """
    keep = whole_mask(shape, p, like, inplace)
    if isinstance(part, slice):
        return keep.narrow(dim, part.start, part.stop - part.start)
    return keep.index_select(dim, part)


def scaled(x: torch.Tensor, keep: torch.Tensor, p: float, inplace: bool = False) -> torch.Tensor:
    """`x` where it is kept, times 1 / (1 - p), and zeros."""
    if p == 1:
        return x * keep
    if x.is_cuda and not inplace:
        wide = torch.tensor(1 - p, dtype=comm.accumulation_dtype(x.dtype)).item()  # as that kernel of torch's has it
        return x * keep * (1 / wide)
    return x * (keep.to(x.dtype) / (1 - p))


def whole_mask(shape: Sequence[int], p: float, like: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    """The elements that torch's dropout, be it `inplace`, would keep of a whole contiguous tensor, booleans.

    `like` gives the device, and the type, by which kernels of GPUs draw for several elements at once.
    """
    if p == 1:  # torch draws nothing
        return torch.zeros(shape, dtype=torch.bool, device=like.device)
    if like.is_cuda and not inplace:
        return torch.native_dropout(like.new_ones(shape), p, True)[1]
    drawn = like.dtype if like.is_cuda else torch.bool
    return torch.empty(shape, dtype=drawn, device=like.device).bernoulli_(1 - p).bool()


class SplitDropout(torch.nn.Dropout):
    """Mixin for nn.Dropout on features that are divided.

    Attributes: `features`, of the whole; `part`, those of this rank; `unit_calls`, within which alone it may drop any.
    """

    features: int
    part: slice
    path: str
    unit_calls: UnitCalls | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        check_hooks(self)
        if self.unit_calls is not None and self.training and self.p:
            self.unit_calls.check(self.path)
        return drop(input, self, self.features, self.part)


def drop(x: torch.Tensor, module: torch.nn.Dropout, features: int, part: slice) -> torch.Tensor:
    """What nn.Dropout makes of `part` of so many features."""
    if not module.training or module.p == 0:
        return x
    keep = kept((*x.shape[:-1], features), module.p, x.dim() - 1, part, x, module.inplace)
    return scaled(x, keep, module.p, module.inplace)
