"""The norm of the whole gradient, and clipping by it."""

from __future__ import annotations

import numbers
from collections.abc import Iterable

import torch

from hpctrain import comm
from hpctrain.comm.buffers import REDUCED_HERE
from hpctrain.grid import Grid
from hpctrain.parameter import shard_of


def local_squares(parameters: Iterable[torch.nn.Parameter], coords: dict[str, int]) -> torch.Tensor:
    """Sums of the squares of the gradients that this rank counts, float64: those of spread experts are the second.

    Of every slice one of the ranks that hold it counts it, at each place along the axis `alike` of its `Shard`.
    """
    counted = [(p.grad, shard_of(p)) for p in parameters if p.grad is not None]
    counted = [(gradient, shard) for gradient, shard in counted if shard.owned(coords)]
    return torch.stack([square([g for g, shard in counted if shard.alike == axis]) for axis in ("data", "copies")])


def replica_totals(loss: torch.Tensor, squares: torch.Tensor, grid: Grid) -> torch.Tensor:
    """The `loss` over the tensor and pipeline axes, and the square of the norm of the whole gradient. Collective.

    Args:
        squares: as `local_squares` gives them, of gradients that are summed over the replicas.
    """
    totals = comm.all_reduce(torch.stack([loss, squares[0]]), grid.tensor)
    totals[1] += comm.all_reduce(squares[1:], grid.expert)[0]
    return comm.all_reduce(totals, grid.pipeline)


def square(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Sum of the squares of all elements, float64; taken in float32 where they have 16 bits. Of the dtypes in the order
    in which they come: a set's differs between processes, and with it the last bits."""
    found = torch.zeros((), dtype=torch.float64)
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        wide = torch.float32 if dtype in REDUCED_HERE else None
        norms = torch._foreach_norm([tensor for tensor in tensors if tensor.dtype == dtype], 2, wide)
        found = found + torch.stack(norms).double().square().sum().cpu()
    return found


def clip(parameters: Iterable[torch.nn.Parameter], norm: float, limit: float) -> None:
    """Scale all gradients so that their norm is at most `limit`, as torch.nn.utils.clip_grad_norm_ does."""
    factor = clipping_factor(norm, limit)
    gradients = [p.grad for p in parameters if p.grad is not None]
    if gradients and not factor >= 1:
        torch._foreach_mul_(gradients, factor)


def check_max_norm(max_norm: float) -> None:
    """Raise ValueError for what no norm can be."""
    number = isinstance(max_norm, (numbers.Real, torch.Tensor)) and not isinstance(max_norm, bool)
    if not (number and max_norm >= 0):
        raise ValueError(f"max_norm must be a number from 0 on, got {max_norm!r}")


def clipping_factor(norm: float, limit: float) -> float:
    """What a gradient of this norm is multiplied by; NaN where the norm is NaN.

    >>> clipping_factor(3.0, 6.0), round(clipping_factor(3.0, 1.5), 6), clipping_factor(float("nan"), 1.0)
    (1.0, 0.5, nan)
    """
    factor = limit / (norm + 1e-6)
    return 1.0 if factor > 1 else factor
