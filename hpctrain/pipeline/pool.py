"""Buffers for arriving messages, used again once nothing refers to their memory."""

from __future__ import annotations

import torch


class Pool:
    """Gives out tensors; makes a new one only while all of that shape are in use.

    In use is what any tensor refers to: a view, what autograd saved, a message under way. So nobody has to give
    anything back, and there are never more buffers than messages and activations that are alive at once.

    Attributes:
        buffers: {(shape, dtype, device): all of them}.
    """

    def __init__(self):
        self.buffers: dict[tuple, list[torch.Tensor]] = {}

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None) -> torch.Tensor:
        """A tensor of any values."""
        buffers = self.buffers.setdefault((shape, dtype, device), [])
        for buffer in buffers:
            # The buffer itself and the object that is asked hold the storage; any other tensor would be a third. torch
            # has no public count: what autograd saved is no Python object that a weak reference could watch.
            if torch._C._storage_Use_Count(buffer.untyped_storage()._cdata) == 2:
                return buffer.detach()
        buffers.append(torch.empty(shape, dtype=dtype, device=device))
        return buffers[-1].detach()
