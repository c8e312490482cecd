"""What replicas tell each other of losses and metrics; all ranks of the axis are given the same."""

from __future__ import annotations

import torch

from hpctrain import comm
from hpctrain.grid import Axis


def gather(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The rows of all ranks, in their order; of several ranks' scalars a vector.

    Raises:
        ValueError: on every rank of the axis, where they have tensors of different shapes.
    """
    rows = tensor.detach() if tensor.dim() else tensor.detach()[None]
    shapes = comm.all_gather_object(tuple(rows.shape), axis)
    if len({*shapes}) > 1:
        raise ValueError(
            f"replicas gather tensors of one shape, got {', '.join(map(str, shapes))}; call pad_across_processes before"
        )
    return comm.all_gather(rows, axis)


def pad(tensor: torch.Tensor, axis: Axis, dim: int, value: float, first: bool) -> torch.Tensor:
    """As long along `dim` as the longest of all ranks, with `value` after its own elements, or before them.

    A tensor of fewer dimensions is left as it is.
    """
    if not -tensor.dim() <= dim < tensor.dim():
        return tensor
    shape = list(tensor.shape)
    shape[dim] = max(comm.all_gather_object(shape[dim], axis)) - shape[dim]
    filler = tensor.new_full(shape, value)
    return torch.cat((filler, tensor) if first else (tensor, filler), dim)


def reduce(tensor: torch.Tensor, axis: Axis, reduction: str) -> torch.Tensor:
    """A new tensor: the "sum", "mean", "max" or "min" of all ranks' elements."""
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    total = comm.all_reduce(total, axis, "sum" if reduction == "mean" else reduction)
    return total / axis.size if reduction == "mean" else total
