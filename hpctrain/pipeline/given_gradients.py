"""Backward from tensors whose gradients are given."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hpctrain.once_differentiable import once_differentiable


def scalar_of(ends: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """A scalar whose gradient by each of `ends` is the given one, or ones where that is None.

    `scalar_of(ends, gradients).backward()` does what `torch.autograd.backward(ends, gradients)` does, which imports
    torch's symbolic shapes for it, and with them sympy: a second and 36 MB on every rank.

    >>> x = torch.ones(2, requires_grad=True)
    >>> scalar_of([3 * x, x.sum()], [torch.tensor([1.0, 2.0]), None]).backward()
    >>> x.grad
    tensor([4., 7.])
    """
    given = [torch.ones_like(end) if gradient is None else gradient for end, gradient in zip(ends, gradients)]
    return _GivenGradients.apply(given, *ends)


class _GivenGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gradients, *ends):
        ctx.gradients = gradients
        return ends[0].new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return None, *ctx.gradients
