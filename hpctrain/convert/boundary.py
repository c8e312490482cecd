"""Into a split unit and out of it: where whole activations, the same on every rank, meet divided work.

Outside a unit every rank of the tensor axis holds each activation whole, and computes the one loss from it; so each
holds the same whole gradient of it too. Inside, ranks hold different parts, the loss is a sum over ranks and
`comm.functional` applies. The operations here lie on the border, each with its adjoint. There, the inner product of
a whole tensor is counted once, on any one rank, and that of a divided one is the sum over ranks. On one rank, x itself
is both: a view of it could not be changed in place.

Source: f and g of Shoeybi et al., "Megatron-LM" (2019), section 3.
"""

from __future__ import annotations

import torch

from hpctrain.comm.functional import with_adjoint
from hpctrain.comm.out_of_place import rows_of_all, sum_of_all
from hpctrain.grid import Axis


def enter(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """A whole tensor for every rank to work on its part with. Adjoint: the sum of what the ranks made of it."""
    return x if axis.size == 1 else with_adjoint(x, _same, sum_of_all, axis)


def leave(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The whole tensor, from summands on every rank. Adjoint: the gradient itself."""
    return x if axis.size == 1 else with_adjoint(x, sum_of_all, _same, axis)


def take(x: torch.Tensor, axis: Axis, counts: tuple[int, ...], dim: int) -> torch.Tensor:
    """This rank's part of a whole tensor along `dim`; rank r takes counts[r]. Adjoint: `gather`."""
    return x if axis.size == 1 else with_adjoint(x, _part, _whole, axis, counts, dim)


def gather(x: torch.Tensor, axis: Axis, counts: tuple[int, ...], dim: int) -> torch.Tensor:
    """The whole tensor, from every rank's part along `dim`. Adjoint: `take`."""
    return x if axis.size == 1 else with_adjoint(x, _whole, _part, axis, counts, dim)


def gather_blocks(
    x: torch.Tensor, axis: Axis, blocks: tuple[tuple[slice, ...], ...], shape: tuple[int, ...]
) -> torch.Tensor:
    """The whole tensor of a shape, of which rank r has the slices blocks[r]. Adjoint: this rank's."""
    return with_adjoint(x, _assembled, _block, axis, blocks, shape)


def gather_for_batches(x: torch.Tensor, axis: Axis, counts: tuple[int, ...], dim: int, alike: int) -> torch.Tensor:
    """The whole tensor, from every rank's part, for ranks with batches of their own, each of which `alike` ranks have.

    Adjoint: this rank's part of the sum of their gradients, in which each counts 1 / alike: together with the ranks
    that hold the same part, each batch counts once.
    """
    return with_adjoint(x, _whole_for_batches, _part_of_sum, axis, counts, dim, alike)


def _same(x, axis):
    return x.view_as(x)


def _part(x, axis, counts, dim):
    return x.narrow(dim, sum(counts[: axis.rank]), counts[axis.rank])


def _whole(x, axis, counts, dim):
    if dim == 0:
        return rows_of_all(x, axis, counts)
    shapes = [(*x.shape[:dim], count, *x.shape[dim:][1:]) for count in counts]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    flat = rows_of_all(x.reshape(-1), axis, sizes)
    return torch.cat([block.view(shape) for block, shape in zip(flat.split(sizes), shapes)], dim)


def _assembled(x, axis, blocks, shape):
    whole = x.new_empty(shape)
    parts = [whole[block] for block in blocks]
    flat = rows_of_all(x.reshape(-1), axis, [part.numel() for part in parts])
    for part, came in zip(parts, flat.split([part.numel() for part in parts])):
        part.copy_(came.view(part.shape))
    return whole


def _block(x, axis, blocks, shape):
    return x[blocks[axis.rank]]


def _whole_for_batches(x, axis, counts, dim, alike):
    return _whole(x, axis, counts, dim)


def _part_of_sum(x, axis, counts, dim, alike):
    return _part(sum_of_all(x, axis), axis, counts, dim) / alike
