"""Auxiliary losses of a router: load balance, of each sequence or of all tokens of a step, and small logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hpctrain.once_differentiable import once_differentiable

if TYPE_CHECKING:
    from hpctrain.layers.experts.record import Record
    from hpctrain.layers.experts.whole_rows import WholeRows


def auxiliary_losses(
    logits: torch.Tensor, probabilities: torch.Tensor, parts: torch.Tensor | None, rows: WholeRows, aux_loss: float,
    z_loss: float,
) -> torch.Tensor:  # fmt: skip
    """This rank's share of the load balancing loss and of the z-loss, (2,).

    Args:
        logits, probabilities: (tokens, experts).
        parts: (sequences, experts), of each sequence's pairs; None without a load balancing loss of sequences.
        aux_loss, z_loss: what they count, times the share of a sequence.
    """
    length = max(1, rows.tokens.whole)
    losses = logits.new_zeros(2)
    if parts is not None:
        agreement = (probabilities * parts[rows.sequences(parts.device)]).sum()
        losses[0] = agreement * (aux_loss * probabilities.shape[1] / length)
    if z_loss:
        losses[1] = logits.logsumexp(1).square().sum() * (z_loss / length)
    return losses


def add_loss(x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """x, with which the gradient of `loss` comes, once, however x is used: it need not be carried to the end.

    Source: Megatron-LM's MoEAuxLossAutoScaler.
    """
    return _AddLoss.apply(x, loss)


class _AddLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, loss):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, grad.new_ones(())


def add_step_loss(x: torch.Tensor, probabilities: torch.Tensor, scale: float, record: Record) -> torch.Tensor:
    """x, with which the gradient of this rank's share of the load balancing loss of a whole step comes:
    scale · Σ over experts of the part of the step's pairs that it is chosen for × its probabilities, (tokens, experts).

    The parts are asked for in backward, when all forwards of the step have been; see `Record.parts_of_step`.

    Source: Qiu et al., "Demons in the detail: on implementing load balancing loss" (2025), whose global batch it is.
    """
    return _AddStepLoss.apply(x, probabilities, scale, record)


class _AddStepLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, probabilities, scale, record):
        ctx.save_for_backward(probabilities)
        ctx.scale, ctx.record = scale, record
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (probabilities,) = ctx.saved_tensors
        weights = ctx.record.parts_of_step().to(probabilities) * ctx.scale
        ctx.record.add_losses(torch.stack([probabilities.sum(0) @ weights, weights.new_zeros(())]))
        return grad, weights.expand_as(probabilities), None, None
