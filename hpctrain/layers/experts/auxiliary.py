"""Auxiliary losses of a router: load balance, and small logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from hpctrain.layers.experts.whole_rows import WholeRows


def auxiliary_losses(
    logits: torch.Tensor, scores: torch.Tensor, parts: torch.Tensor | None, rows: WholeRows, aux_loss: float,
    z_loss: float, normalize: bool,
) -> torch.Tensor:  # fmt: skip
    """This rank's share of the load balancing loss and of the z-loss, (2,).

    Args:
        logits, scores: (tokens, experts).
        parts: (sequences, experts), of each sequence's pairs; None without `aux_loss`.
        aux_loss, z_loss: what they count, each a mean over the sequences of the step.
        normalize: scores do not sum to 1 by themselves.
    """
    share, length = rows.tokens.share, rows.tokens.whole
    losses = logits.new_zeros(2)
    if parts is not None:
        probabilities = scores / scores.sum(1, keepdim=True) if normalize else scores
        agreement = (probabilities * parts[rows.sequences(parts.device)]).sum()
        losses[0] = agreement * (aux_loss * share * scores.shape[1] / length)
    if z_loss:
        losses[1] = logits.logsumexp(1).square().sum() * (z_loss * share / length)
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
