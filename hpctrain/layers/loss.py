"""Cross entropy of logits in the inner layout: the vocabulary is spread over ranks, and none sees a whole row."""

from __future__ import annotations

import math

import torch

from hpctrain import comm
from hpctrain.grid import Grid
from hpctrain.layers.algorithm import algorithm_of


class CrossEntropy(torch.nn.Module):
    """Sum of -log softmax(logits)[target] over the rows that are not ignored, times `scale`; any vocabulary size.

    Equals torch.nn.functional.cross_entropy(reduction="sum", label_smoothing=…, ignore_index=…) times `scale`.

    Args:
        label_smoothing: the part of the target, from 0 to 1, that is spread evenly over the whole vocabulary.
        ignore_index: rows of this target count nothing and get no gradient, whatever their logits; any integer.
        algorithm: of the layer that makes the logits; see `Linear`.

    Shapes: logits (rows, vocabulary) in the inner layout, targets (rows,) int64. Each rank returns its share of the
    loss: the sum over all ranks of the tensor axis is the loss. Backward must start from the same gradient on all.
    The loss of bfloat16 and float16 logits is computed, and returned, in float32.
    A target outside the vocabulary, other than `ignore_index`, makes the loss and its row's gradient NaN.

    Raises:
        ValueError: when label_smoothing is not from 0 to 1.
    """

    def __init__(self, grid: Grid, vocabulary: int, label_smoothing: float = 0.0, ignore_index: int = -100,
                 algorithm="agarwal"):  # fmt: skip
        super().__init__()
        if not 0 <= label_smoothing <= 1:
            raise ValueError(f"label_smoothing must be from 0 to 1, got {label_smoothing}")
        self.vocabulary, self.label_smoothing, self.ignore_index = vocabulary, label_smoothing, ignore_index
        algorithm = algorithm_of(grid, algorithm)
        self.plane, self.first = algorithm.columns, algorithm.inner(vocabulary).start

    def forward(self, logits: torch.Tensor, targets: torch.Tensor, scale: float) -> torch.Tensor:
        wide = logits.to(comm.accumulation_dtype(logits.dtype))
        return _CrossEntropy.apply(wide, targets, scale, self)

    def row_weights(self, targets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """1 for the rows that count, 0 for the ignored ones, NaN for targets outside the vocabulary."""
        inside = (targets >= 0) & (targets < self.vocabulary)
        weights = torch.where(inside, 1.0, math.nan).to(dtype)
        return weights.masked_fill_(targets == self.ignore_index, 0.0)


class _CrossEntropy(torch.autograd.Function):
    """The target is `sharp` at one word and `smooth` at every word. As these sum to one over the vocabulary, a row's
    loss is the logarithm of its normaliser less its logits weighted by the target: one more number a rank."""

    @staticmethod
    def forward(ctx, logits, targets, scale, layer):
        rows, columns = logits.shape
        plane, sharp, smooth = layer.plane, 1 - layer.label_smoothing, layer.label_smoothing / layer.vocabulary
        local, ignored = targets - layer.first, targets == layer.ignore_index
        found = ((local >= 0) & (local < columns)).nonzero().squeeze(1)
        place = found, local[found]
        # One exchange: each rank's log-sum-exp, and its part of the logits weighted by the target.
        partial = logits.new_zeros(2, rows)
        softmax = logits.softmax(1)
        if columns:
            highest = logits.amax(1)
            partial[0] = highest - softmax.amax(1).log_()
            # These have no weight here. torch's softmax of -inf is NaN, and what is ignored may hold anything.
            masked = ((highest == -math.inf) | ignored).nonzero().squeeze(1)
            partial[0, masked] = -math.inf
            softmax[masked] = 0
        else:
            partial[0] = -math.inf
        partial[1, found] = logits[place] * sharp
        if smooth:
            partial[1] += logits.sum(1) * smooth
        parts = comm.all_gather(partial, plane).view(plane.size, 2, rows)
        normaliser = parts[:, 0].logsumexp(0)
        weights = layer.row_weights(targets, logits.dtype)
        ctx.softmax, ctx.place, ctx.sharp, ctx.smooth = softmax, place, sharp, smooth
        ctx.weights = weights * scale
        ctx.share = (partial[0] - normaliser).exp_().masked_fill_(ignored, 0)  # of the row's softmax that lies here
        loss = (normaliser - parts[:, 1].sum(0)).masked_fill_(ignored, 0) @ ctx.weights
        return loss if plane.rank == 0 else torch.zeros_like(loss)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        if ctx.softmax is None:
            raise RuntimeError("CrossEntropy cannot run backward a second time: the first one used up its softmax")
        weights = ctx.weights * grad
        grad_logits, ctx.softmax = ctx.softmax, None
        share = (ctx.share * weights)[:, None]
        if ctx.smooth:
            torch.addcmul((weights * -ctx.smooth)[:, None], grad_logits, share, out=grad_logits)
        else:
            grad_logits *= share
        grad_logits[ctx.place] -= weights[ctx.place[0]] * ctx.sharp
        return grad_logits, None, None, None
