"""Cross entropy of logits in the inner layout: the vocabulary is spread over ranks, and none sees a whole row."""

from __future__ import annotations

import math

import torch

from hpctrain import comm
from hpctrain.grid import Grid
from hpctrain.layers.algorithm import Algorithm, algorithm_of
from hpctrain.layers.parameter import check_sizes
from hpctrain.once_differentiable import once_differentiable


class CrossEntropy(torch.nn.Module):
    """Sum of -log softmax(logits)[target] over the rows that are not ignored, times `scale`; any vocabulary size.

    Equals torch.nn.functional.cross_entropy(reduction="sum", label_smoothing=…, ignore_index=…) times `scale`, with
    `z_loss` times the square of log(sum(exp(logits))) for each of these rows; in evaluation without these two.

    Args:
        label_smoothing: the part of the target, from 0 to 1, that is spread evenly over the whole vocabulary.
        z_loss: of Chowdhery et al., "PaLM" (2022), §5.
        ignore_index: rows of this target count nothing and get no gradient, whatever their logits; any integer.
        algorithm: of the layer that makes the logits; see `Linear`.

    Shapes: logits (rows, vocabulary) in the inner layout, targets (rows,) int64. Each rank returns its share of the
    loss: the sum over all ranks of the tensor axis is the loss. Backward must start from the same gradient on all.
    The loss of bfloat16 and float16 logits is computed, and returned, in float32.
    A target outside the vocabulary, other than `ignore_index`, makes the loss and its row's gradient NaN.

    Raises:
        ValueError: when label_smoothing is not from 0 to 1; when called, for other shapes.
    """

    def __init__(self, grid: Grid, vocabulary: int, label_smoothing: float = 0.0, ignore_index: int = -100,
                 algorithm: str | Algorithm = "agarwal", z_loss: float = 0.0):  # fmt: skip
        super().__init__()
        check_sizes(vocabulary=vocabulary)
        if not 0 <= label_smoothing <= 1:
            raise ValueError(f"label_smoothing must be from 0 to 1, got {label_smoothing}")
        self.vocabulary, self.label_smoothing, self.ignore_index = vocabulary, label_smoothing, ignore_index
        self.z_loss = z_loss
        algorithm = algorithm_of(grid, algorithm)
        self.plane, words = algorithm.columns, algorithm.inner(vocabulary)
        self.first, self.columns = words.start, words.stop - words.start

    def forward(self, logits: torch.Tensor, targets: torch.Tensor, scale: float) -> torch.Tensor:
        if targets.dim() != 1 or logits.shape != (len(targets), self.columns):
            raise ValueError(
                f"CrossEntropy of a vocabulary of {self.vocabulary} takes this rank's (rows, {self.columns}) logits in "
                f"the inner layout and (rows,) targets, got {tuple(logits.shape)} and {tuple(targets.shape)}"
            )
        wide = logits.to(comm.accumulation_dtype(logits.dtype))
        return _CrossEntropy.apply(wide, targets, scale, self)

    @property
    def regularisation(self) -> tuple[float, float]:
        """Label smoothing and z-loss."""
        return (self.label_smoothing, self.z_loss) if self.training else (0.0, 0.0)

    def row_weights(
        self, targets: torch.Tensor, ignored: torch.Tensor, scale: float, like: torch.Tensor
    ) -> torch.Tensor:
        """`scale` for the rows that count, 0 for the ignored ones, NaN for targets outside the vocabulary."""
        outside = targets.clamp(0, self.vocabulary - 1) != targets
        weights = like.new_full(targets.shape, scale)
        return weights.masked_fill_(outside, math.nan).masked_fill_(ignored, 0.0)


class _CrossEntropy(torch.autograd.Function):
    """The target is `sharp` at one word and `smooth` at every word. As these sum to one over the vocabulary, a row's
    loss is the logarithm of its normaliser less its logits weighted by the target: one more number a rank."""

    @staticmethod
    def forward(ctx, logits, targets, scale, layer):
        rows, columns = logits.shape
        plane = layer.plane
        smoothing, z_loss = layer.regularisation
        sharp, smooth = 1 - smoothing, smoothing / layer.vocabulary
        local, ignored = targets - layer.first, targets == layer.ignore_index
        # Dense, as a list of the rows whose target is here would stall a GPU.
        place = local.clamp(0, max(columns - 1, 0))
        elsewhere = place != local
        # One exchange: each rank's log-sum-exp, and its part of the logits weighted by the target.
        partial = logits.new_zeros(2, rows)
        softmax = logits.softmax(1)
        if columns:
            highest = logits.amax(1)
            torch.sub(highest, softmax.amax(1).log_(), out=partial[0])
            # These have no weight here. torch's softmax of -inf is NaN, and what is ignored may hold anything.
            masked = (highest == -math.inf) | ignored
            partial[0].masked_fill_(masked, -math.inf)
            if masked.is_cuda:  # which would be waited for
                softmax.masked_fill_(masked[:, None], 0.0)
            elif masked.any():
                softmax.index_fill_(0, masked.nonzero()[:, 0], 0.0)
            torch.mul(logits.gather(1, place[:, None])[:, 0], sharp, out=partial[1]).masked_fill_(elsewhere, 0.0)
        else:
            partial[0] = -math.inf
        if smooth:
            partial[1] += logits.sum(1) * smooth
        parts = comm.all_gather(partial, plane).view(plane.size, 2, rows)
        normaliser = parts[:, 0].logsumexp(0)
        ctx.weights = layer.row_weights(targets, ignored, scale, logits)
        ctx.softmax, ctx.place, ctx.sharp, ctx.smooth = softmax, (place, elsewhere), sharp, smooth
        ctx.share = (partial[0] - normaliser).exp_()  # of the row's softmax that lies here
        loss = normaliser - parts[:, 1].sum(0)
        if z_loss:
            loss += z_loss * normaliser.square()
            ctx.share *= 1 + 2 * z_loss * normaliser
        ctx.share.masked_fill_(ignored, 0)
        loss = loss.masked_fill_(ignored, 0) @ ctx.weights
        return loss if plane.rank == 0 else torch.zeros_like(loss)

    @staticmethod
    @once_differentiable
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
        if grad_logits.shape[1]:
            place, elsewhere = ctx.place
            of_target = (weights * -ctx.sharp).masked_fill_(elsewhere, 0.0)
            grad_logits.scatter_add_(1, place[:, None], of_target[:, None])
        return grad_logits, None, None, None
