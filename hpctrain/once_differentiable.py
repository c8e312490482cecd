"""Backwards that have no derivative, and say so where one is asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def once_differentiable(backward: Callable) -> Callable:
    """Of a `backward` of torch.autograd.Function: it raises ValueError within create_graph=True.

    torch's decorator of this name lets that pass, and raises when a derivative goes through what the backward gave.
    torch.autograd.grad(…, inputs) does not go there, as the error leads to no input, and counts what the backward has
    of tensors that forward saved as constant: a second derivative came out wrong in silence.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: torch.Tensor | None):
        if torch.is_grad_enabled():
            raise ValueError(
                f"{ctx.name().removesuffix('Backward').lstrip('_')} of hpctrain has no second derivative, got a "
                "backward with create_graph=True; leave it out, or use torch's own operation there"
            )
        return backward(ctx, *grads)

    return checked
