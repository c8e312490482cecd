"""Cross entropy of logits whose vocabulary is spread over (x, y); no rank sees a whole row of logits."""

from __future__ import annotations

import math

import torch

from hpctrain import comm
from hpctrain.shard import split, subsplit


class CrossEntropy(torch.nn.Module):
    """Sum over the rows of -log softmax(logits)[target], times `scale`; any vocabulary size.

    Shapes: logits (rows, vocabulary) in the inner layout, targets (rows,) int64. Each rank returns its share of the
    loss: the sum over all ranks of the tensor axis is the loss. Backward must start from the same gradient on all.
    """

    def __init__(self, grid, vocabulary: int):
        super().__init__()
        x, y = grid.tensor.x, grid.tensor.y
        self.plane = grid.plane("x", "y")
        self.first = subsplit(split(vocabulary, x.size, x.rank), y.size, y.rank).start

    def forward(self, logits: torch.Tensor, targets: torch.Tensor, scale: float) -> torch.Tensor:
        return _CrossEntropy.apply(logits, targets, self.plane, self.first, scale)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, plane, first, scale):
        rows, held = logits.shape
        local = targets - first
        found = ((local >= 0) & (local < held)).nonzero().squeeze(1)
        place = found, local[found]
        # One exchange: each rank's log-sum-exp, and the logit of the target where it lies here.
        partial = logits.new_zeros(2, rows)
        softmax = logits.softmax(1)
        if held:
            partial[0] = logits.amax(1) - softmax.amax(1).log_()
        else:
            partial[0] = -math.inf
        partial[1, found] = logits[place]
        parts = comm.all_gather(partial, plane).view(plane.size, 2, rows)
        normaliser = parts[:, 0].logsumexp(0)
        ctx.softmax, ctx.place, ctx.scale = softmax, place, scale
        ctx.share = (partial[0] - normaliser).exp_()  # of the whole row's softmax that lies here
        loss = (normaliser - parts[:, 1].sum(0)).sum() * scale
        return loss if plane.rank == 0 else torch.zeros_like(loss)

    @staticmethod
    def backward(ctx, grad):
        if ctx.softmax is None:
            raise RuntimeError("CrossEntropy cannot run backward a second time: the first one used up its softmax")
        factor = grad * ctx.scale
        grad_logits, ctx.softmax = ctx.softmax, None
        grad_logits *= (ctx.share * factor)[:, None]
        grad_logits[ctx.place] -= factor
        return grad_logits, None, None, None, None
