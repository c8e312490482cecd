"""Scores of experts, of logits, and what the experts that are chosen by them weigh."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hpctrain import gemm
from hpctrain.once_differentiable import once_differentiable


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
    x: torch.Tensor, wide: torch.Tensor, factors: torch.Tensor | None, weight: torch.Tensor, chosen: Chosen
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tokens, top_k), what the outputs of the experts count; x; the scores and the logits, (tokens, experts); all as
    functions of x and of the router's weight, by one step of autograd; the last two only if `chosen.has_losses`.

    The gradient that comes to x from here is added to that of the x that is returned, in its memory: nothing but what
    makes a new gradient may use that.

    Args:
        wide: x in the dtype of the logits, times `factors` where there are some.
        weight: (experts, features).
    """
    if chosen.has_losses:
        return _Weigh.apply(x, wide, factors, weight, chosen, chosen.scores, chosen.logits)
    return *_Weigh.apply(x, wide, factors, weight, chosen), chosen.scores, chosen.logits


@dataclass(frozen=True)
class Chosen:
    """What experts are chosen by, and which are.

    Attributes:
        logits: wide · weightᵀ.
        scores: SCORES[kind] of the logits.
        experts: (tokens, top_k) int64.
        normalized: the weights of a token sum to `scale`; otherwise they are its scores times `scale`.
        has_losses: scores or logits have a gradient of their own.
    """

    logits: torch.Tensor
    scores: torch.Tensor
    experts: torch.Tensor
    kind: str
    normalized: bool
    scale: float
    has_losses: bool


class _Weigh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, wide, factors, weight, chosen, *passed):
        logits, scores = chosen.logits, chosen.scores
        ctx.of_logits, total = chosen.normalized and chosen.kind == "softmax", None
        if ctx.of_logits:  # the softmax over a token's own experts, which needs no sums over the others
            weights = logits.gather(1, chosen.experts).softmax(1)
        else:
            weights = scores.gather(1, chosen.experts)
            if chosen.normalized:
                total = weights.sum(1, keepdim=True).add_(_LEAST)
                weights.div_(total)
        ctx.save_for_backward(wide, factors, weight, scores, chosen.experts, weights, total)
        ctx.kind, ctx.scale, ctx.dtype = chosen.kind, chosen.scale, x.dtype
        ctx.set_materialize_grads(False)
        return weights if chosen.scale == 1 else weights * chosen.scale, x, *passed

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, grad_x, grad_scores=None, grad_logits=None):
        wide, factors, weight, scores, experts, weights, total = ctx.saved_tensors
        if grad is not None:
            of_chosen = grad if ctx.scale == 1 else grad * ctx.scale
            if ctx.of_logits:
                of_chosen = Softmax.backward(of_chosen, weights)
            elif total is not None:
                of_chosen = (of_chosen - (of_chosen * weights).sum(1, keepdim=True)).div_(total)
            of_all = torch.zeros_like(scores).scatter_(1, experts, of_chosen)
            if ctx.of_logits:
                grad_logits = of_all if grad_logits is None else of_all.add_(grad_logits)
            else:
                grad_scores = of_all if grad_scores is None else of_all.add_(grad_scores)
        if grad_scores is not None:
            of_all = SCORES[ctx.kind].backward(grad_scores, scores)
            grad_logits = of_all if grad_logits is None else of_all.add_(grad_logits)
        grad_weight = None
        if grad_logits is not None:
            if ctx.needs_input_grad[3]:
                grad_weight = gemm.mm(grad_logits.t(), wide).to(weight.dtype)
            if ctx.needs_input_grad[0]:
                grad_x = _plus(grad_x, grad_logits, weight, factors).to(ctx.dtype)
        return grad_x, None, None, grad_weight, None, *[None for _ in ctx.needs_input_grad[5:]]


def _plus(grad_x, grad_logits, weight, factors):
    """grad_x and the gradient that comes to x from the logits."""
    weight = weight.to(grad_logits.dtype)
    if grad_x is not None and factors is None and grad_x.dtype is weight.dtype:
        return gemm.addmm(grad_x, grad_logits, weight, out=grad_x)
    more = gemm.mm(grad_logits, weight)
    if factors is not None:
        more.mul_(factors)
    return more if grad_x is None else grad_x.add_(more)
