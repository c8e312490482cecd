"""Buffers for arriving messages, used again once nothing refers to their memory."""

from __future__ import annotations

import torch

SHAPES = 16  # at once, before idle ones are forgotten


class Pool:
    """Gives out tensors; makes a new one only while all of that shape are in use.

    In use is what any tensor refers to: a view, what autograd saved, a message under way. So nobody has to give
    anything back, and there are never more buffers of a shape than messages and activations that are alive at once.
    Where there are many shapes, those of which none is in use are forgotten.

    Attributes:
        buffers: {(shape, dtype, device): all of them}.
    """

    def __init__(self):
        self.buffers: dict[tuple, list[torch.Tensor]] = {}

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None) -> torch.Tensor:
        """A tensor of any values."""
        kind = (shape, dtype, device)
        for buffer in self.buffers.get(kind, ()):
            if _is_idle(buffer):
                return buffer.detach()
        if kind not in self.buffers and len(self.buffers) >= SHAPES:
            self.buffers = {k: each for k, each in self.buffers.items() if not all(map(_is_idle, each))}
        made = torch.empty(shape, dtype=dtype, device=device)
        self.buffers.setdefault(kind, []).append(made)
        return made.detach()


def _is_idle(buffer: torch.Tensor) -> bool:
    # The buffer itself and the object that is asked hold the storage; any other tensor would be a third. torch has no
    # public count: what autograd saved is no Python object that a weak reference could watch.
    return torch._C._storage_Use_Count(buffer.untyped_storage()._cdata) == 2
