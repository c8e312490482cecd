"""Scores of experts, of logits, and what the experts that are chosen by them weigh."""

from __future__ import annotations

import torch


class Softmax:
    """Over the experts."""

    @staticmethod
    def forward(logits: torch.Tensor) -> torch.Tensor:
        return logits.softmax(1)

    @staticmethod
    def backward(grad: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The gradient of the logits."""
        return torch._softmax_backward_data(grad, scores, 1, scores.dtype)


class Sigmoid:
    """Of each expert; methods as of `Softmax`."""

    @staticmethod
    def forward(logits: torch.Tensor) -> torch.Tensor:
        return logits.sigmoid()

    @staticmethod
    def backward(grad: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.sigmoid_backward.default(grad, scores)


SCORES: dict[str, type[Softmax] | type[Sigmoid]] = {"softmax": Softmax, "sigmoid": Sigmoid}
_LEAST = 1e-20  # beside a sum of scores, of which DeepSeek-V3's may all be 0


def weigh(
    logits: torch.Tensor, scores: torch.Tensor, experts: torch.Tensor, kind: str, normalized: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, top_k), what the outputs of `experts` count, and `scores` (tokens, experts), both as functions of the
    logits: one step of autograd in place of seven.

    Args:
        scores: SCORES[kind] of the logits, without a gradient.
        normalized: the weights of a token sum to `scale`; otherwise they are its scores times `scale`.
    """
    return _Weigh.apply(logits, scores, experts, kind, normalized, scale)


class _Weigh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, scores, experts, kind, normalized, scale):
        weights, total = scores.gather(1, experts), None
        if normalized:
            total = weights.sum(1, keepdim=True).add_(_LEAST)
            weights.div_(total)
        if scale != 1:
            weights.mul_(scale)
        ctx.save_for_backward(scores, experts, weights, total)
        ctx.kind, ctx.scale = kind, scale
        ctx.set_materialize_grads(False)
        return weights, scores

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, grad_scores):
        scores, experts, weights, total = ctx.saved_tensors
        if grad is not None:
            of_chosen = grad if ctx.scale == 1 else grad * ctx.scale
            if total is not None:
                of_chosen = (of_chosen - (grad * weights).sum(1, keepdim=True)).div_(total)
            of_chosen = torch.zeros_like(scores).scatter_(1, experts, of_chosen)
            grad_scores = of_chosen if grad_scores is None else of_chosen.add_(grad_scores)
        return SCORES[ctx.kind].backward(grad_scores, scores), None, None, None, None, None
