"""What attention keeps of the tokens before, where a sequence passes through the model in slices."""

from __future__ import annotations

import torch


class InferenceCache:
    """Keys and values of all tokens so far, which nothing differentiates."""

    def __init__(self):
        self._seen: dict[torch.nn.Module, tuple[torch.Tensor, torch.Tensor]] = {}

    def extend(self, layer: torch.nn.Module, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As of `KVCache`."""
        if layer in self._seen:
            k, v = (torch.cat(parts, 2) for parts in zip(self._seen[layer], (k, v)))
        self._seen[layer] = k, v
        return k, v


class KVCache:
    """Keys and values of the slices of one microbatch, in one pipeline stage.

    Slices go forward from the first to the last and backward from the last to the first. A slice's keys and values are
    handed to later slices as leaves, whose gradients come in as those run backward and are then given to its own.

    Source: Li et al., "TeraPipe" (ICML 2021), §3.1.
    """

    def __init__(self):
        self._slices: dict[torch.nn.Module, list[tuple]] = {}  # layer -> (keys, values, their leaves) of each slice

    def extend(self, layer: torch.nn.Module, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all tokens so far, (sequences, heads, length, width), from those of this slice."""
        slices = self._slices.setdefault(layer, [])
        seen = [torch.cat([*(part[which] for part in slices), new], 2) for which, new in ((2, k), (3, v))]
        slices.append((k, v, *(part.detach().requires_grad_(part.requires_grad) for part in (k, v))))
        return seen[0], seen[1]

    def carried(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The last slice's keys and values and the gradients that later slices have left; the slice is dropped."""
        tensors, gradients = [], []
        for slices in self._slices.values():
            k, v, *leaves = slices.pop()
            for tensor, leaf in zip((k, v), leaves):
                if leaf.grad is not None:
                    tensors.append(tensor)
                    gradients.append(leaf.grad)
        return tensors, gradients
