"""What a product was given is gathered once more in backward, rather than kept until then."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

_CHANGED = "one of the variables needed for gradient computation has been modified by an inplace operation"  # torch's


def once_more(gather: Callable[[torch.Tensor], torch.Tensor], source: torch.Tensor) -> torch.Tensor:
    """`gather(source)`, which `gathering_again` does not keep."""
    gathered = gather(source)
    if torch.is_grad_enabled():
        gathered.__dict__["again"] = _Again(gather, source.detach(), gathered)
    return gathered


@contextlib.contextmanager
def gathering_again(*given: torch.Tensor):
    """Of tensors of `once_more` that operations within the block keep for backward, the sources are kept."""
    known = [x.again for x in given if hasattr(x, "again")] if torch.is_grad_enabled() else []
    if not known:
        yield
        return

    def pack(x):
        again = next((each for each in known if each.is_of(x)), None)
        return (x, x._version) if again is None else again.pack(x)

    def unpack(found):
        x, version, *again = found
        if again:
            return again[0].unpack(x, version)
        if x._version != version:
            raise RuntimeError(_CHANGED)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


class _Again:
    """Gathers a tensor for backward, once for all products that it went into."""

    def __init__(self, gather: Callable[[torch.Tensor], torch.Tensor], source: torch.Tensor, gathered: torch.Tensor):
        self.gather, self.source, self.version = gather, source, source._version
        self.memory, self.elements = gathered.untyped_storage()._cdata, gathered.numel()
        self.packed, self.unpacked = 0, 0
        self.gathered: torch.Tensor | None = None

    def is_of(self, x: torch.Tensor) -> bool:
        """Whether it is the tensor, or a view of all of it."""
        return x.untyped_storage()._cdata == self.memory and x.numel() == self.elements

    def pack(self, x: torch.Tensor):
        self.packed += 1
        return x.shape, x.stride(), self

    def unpack(self, shape, stride) -> torch.Tensor:
        if self.source._version != self.version:
            raise RuntimeError(_CHANGED)
        if self.gathered is None:
            with torch.no_grad():
                self.gathered = self.gather(self.source)
        x = self.gathered.as_strided(shape, stride)
        self.unpacked += 1
        if self.unpacked % self.packed == 0:
            self.gathered = None
        return x
