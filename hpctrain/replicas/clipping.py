"""The norm of the whole gradient, and clipping by it."""

from __future__ import annotations

import torch


def local_square(parameters, coords: dict[str, int]) -> torch.Tensor:
    """Sum of the squares of the gradients that this rank counts, float64.

    Summed over the tensor and pipeline axes it is the square of the norm of the dense gradient: every slice is counted
    by one of the ranks that hold it.
    """
    owned = [p.grad for p in parameters if p.grad is not None and p.shard.owned(coords)]
    if not owned:
        return torch.zeros((), dtype=torch.float64)
    norms = torch._foreach_norm(owned)
    return torch.stack(norms).double().square().sum().cpu()


def clip(parameters, norm: float, limit: float) -> None:
    """Scale all gradients so that their norm is at most `limit`, as torch.nn.utils.clip_grad_norm_ does."""
    factor = limit / (norm + 1e-6)
    if factor < 1:
        torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], factor)
