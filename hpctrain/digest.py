"""Do two ranks hold the same bits? A number that says so, computed where the tensor lies."""

from __future__ import annotations

import torch


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of all elements' bits, each read as an integer and times an odd number of its own, modulo 2^64.

    A change of any one element changes it, whatever the change, since odd numbers have inverses. 0-dim int64, on the
    tensor's device; 0 for no elements.
    """
    kinds = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
    flat = tensor.detach().resolve_conj().contiguous().view(-1)
    elements = flat.view(kinds.get(tensor.itemsize, torch.int64))  # complex128 is two
    chunk = 1 << (16 if tensor.device.type == "cpu" else 22)  # elements at a time: what fits a core's cache, or a GPU
    odd = torch.arange(min(chunk, len(elements)), device=tensor.device).mul_(2).add_(1)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(elements), chunk):
        part = elements[start : start + chunk].long()
        total += (part * odd[: len(part)]).sum() + part.sum() * (2 * start)
    return total
