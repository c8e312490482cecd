"""The router of a mixture of experts."""

from __future__ import annotations

import numpy as np
import torch

from hpctrain import comm, gemm
from hpctrain.choices import AUX_SCOPES, ROUTERS
from hpctrain.grid import Grid
from hpctrain.layers.experts.auxiliary import add_loss, add_step_loss, auxiliary_losses
from hpctrain.layers.experts.record import Record
from hpctrain.layers.experts.routing import Routing
from hpctrain.layers.experts.scores import SCORES, Chosen, weigh
from hpctrain.layers.experts.whole_rows import WholeRows
from hpctrain.layers.parameter import Layer, check_sizes, drawn_key, parameter
from hpctrain.layers.tokens import Tokens
from hpctrain.randomness import RngKey
from hpctrain.shard import Shard


class Router(Layer):
    """Scores each expert for each token by x Wᵀ and chooses the `top_k` best; of equal ones those of lower numbers.

    Computed in float32 at least. Every rank of the tensor axis has all of `weight`, (experts, features), and tokens of
    its own.

    Args:
        scores: "softmax" over the experts, or "sigmoid" of each, as of DeepSeek-V3.
        normalized: the weights of a token's experts sum to 1; otherwise they are the scores themselves.
        groups, groups_kept: experts are in so many groups of neighbours, and a token's are of the best of them: those
            of the largest score or, with "sigmoid", of the two largest together. DeepSeek-V2 and V3.
        scale: of the weights.
        aux_loss: what the auxiliary loss of Switch Transformer counts: experts × the sum over them of the part of a
            sequence's pairs that they are chosen for times their mean probability in it; mean over the sequences, of
            which each counts as the `share` of the tokens says.
        aux_scope: "sequence", or "step" for the same of all tokens of the step over all ranks and microbatches, which
            all have their forwards before the first backward.
        z_loss: what log(sum(exp(logits)))² counts, mean over the tokens; ST-MoE.
        balance_bias: how much the `bias` of an expert changes in a step, up where it had fewer tokens than the mean,
            down where it had more, by `LoadBalance(model, grid).finish_step()`. It is added to the scores to choose
            experts, not to weigh them; DeepSeek-V3. With "sigmoid" there is a bias anyway, since a model may come with
            one.
        jitter: in training the router's x is multiplied by numbers from 1 - jitter to 1 + jitter; Switch Transformer.
        std, key: as of `Linear`.

    Attributes: `record`, of the load and the losses of this step; `loss_scale`, what the `share` of the tokens is
    multiplied by, which a Trainer with `loss=` sets while it trains.

    Shapes: x (tokens, features), whole rows; see `WholeRows`. Nothing moves but, with `aux_loss` where ranks share
    sequences or of a step, one sum of integers.

    Raises:
        ValueError: when more experts are asked for than there are, or for options that are none of these; from forward
            when a sequence comes in parts and its auxiliary loss is asked for.

    Sources: Fedus, Zoph and Shazeer, "Switch Transformers" (2022); Zoph et al., "ST-MoE" (2022); DeepSeek-AI,
    "DeepSeek-V3 technical report" (2024), §2.1.2.
    """

    def __init__(
        self, grid: Grid, features: int, experts: int, top_k: int, *, scores: str = "softmax", normalized: bool = True,
        groups: int = 1, groups_kept: int = 1, scale: float = 1.0, aux_loss: float = 0.0,
        aux_scope: str = "sequence", z_loss: float = 0.0, balance_bias: float = 0.0, jitter: float = 0.0,
        std: float | None = None, key: RngKey | None = None,
        dtype: torch.dtype | None = None, device: torch.device | str | None = None,
    ):  # fmt: skip
        super().__init__()
        check_sizes(features=features, experts=experts)
        _check(experts, top_k, scores, groups, groups_kept, jitter)
        if aux_scope not in AUX_SCOPES:
            raise ValueError(f"aux_scope must be one of {', '.join(AUX_SCOPES)}, got {aux_scope!r}")
        self.grid, self.features, self.experts, self.top_k = grid, features, experts, top_k
        self.scores, self.normalized, self.groups, self.groups_kept = scores, normalized, groups, groups_kept
        self.scale, self.aux_loss, self.z_loss, self.balance_bias = scale, aux_loss, z_loss, balance_bias
        self.aux_scope, self.jitter, self.key = aux_scope, jitter, drawn_key(grid, key)
        std = (3 * features) ** -0.5 if std is None else std
        shard = Shard.whole((experts, features), replicated=("x", "y", "z"))
        self.weight = parameter(grid, shard, self.key / "weight", std, dtype=dtype, device=device)
        self.bias = None
        if balance_bias or scores == "sigmoid":
            wide = comm.accumulation_dtype(self.weight.dtype)  # of many small steps
            shard = Shard.whole((experts,), replicated=("x", "y", "z"))
            self.bias = parameter(grid, shard, self.key / "bias", None, dtype=wide, device=device).requires_grad_(False)
        self.record, self.loss_scale = Record(grid, experts), 1.0

    def forward(self, x: torch.Tensor, tokens: Tokens) -> Routing:
        rows = WholeRows(self.grid, tokens)
        balanced, factors = self.training and tokens.share > 0, None
        with torch.no_grad():
            wide = x.to(comm.accumulation_dtype(x.dtype))
            if self.jitter and self.training:
                factors = self._jitter(rows, tokens.step).to(wide)
                wide = wide * factors
            logits = gemm.mm(wide, self.weight.to(wide.dtype).t())
            scores = SCORES[self.scores].forward(logits)
        (experts, counts, parts), first = tokens.decide(lambda: self._choose(scores, rows, balanced))
        if first and self.training:
            self.record.add_counts(counts)
        has_losses = balanced and bool(self.aux_loss or self.z_loss)
        chosen = Chosen(logits, scores, experts, self.scores, self.normalized, self.scale, has_losses)
        weights, x, scores, logits = weigh(x, wide, factors, self.weight, chosen)
        if has_losses:
            probabilities = scores / scores.sum(1, keepdim=True) if self.scores == "sigmoid" else scores
            share = tokens.share * self.loss_scale
            losses = auxiliary_losses(logits, probabilities, parts, rows, self.aux_loss * share, self.z_loss * share)
            weights = add_loss(weights, losses.sum())
            if first:
                self.record.add_losses(losses)
            if self.aux_loss and self.aux_scope == "step":
                scale = self.aux_loss * share * self.experts / max(1, tokens.whole)
                weights = add_step_loss(weights, probabilities, scale, self.record)
        return Routing(experts, weights, counts, chosen.scores, x, rows, self.record)

    def _choose(self, scores, rows, balanced):
        """(tokens, top_k) experts, how many pairs each has, and of what sequences it has which part, if a loss wants to
        know it."""
        if self.bias is not None:
            scores = scores + self.bias.detach()  # never trained, whatever requires_grad_ is called on
        if self.groups > 1:
            scores = self._within_groups(scores)
        experts = highest(scores, self.top_k)
        counts, parts = torch.bincount(experts.view(-1), minlength=self.experts), None
        if balanced and self.aux_loss and self.aux_scope == "sequence":
            tokens = rows.tokens
            rows.check_whole_sequences("aux_loss")
            # Counts of the whole sequence, which no grid changes: a product of means over parts of it would be another
            places = rows.sequences(experts.device)[:, None] * self.experts + experts
            of_sequences = torch.bincount(places.flatten(), minlength=tokens.sequences * self.experts)
            of_sequences = rows.sum_over_sequences(of_sequences).view(tokens.sequences, self.experts)
            parts = of_sequences.to(scores.dtype) / max(1, tokens.whole * self.top_k)
        return experts, counts, parts

    def _within_groups(self, scores):
        """The scores of the experts in the groups that are kept, -inf for the others."""
        of_group = scores.unflatten(1, (self.groups, -1))
        best = of_group.amax(2)
        if self.scores == "sigmoid":
            best = of_group.topk(min(2, of_group.shape[2]), 2).values.sum(2)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, highest(best, self.groups_kept), True)
        return of_group.masked_fill(~kept[:, :, None], -torch.inf).flatten(1)

    def _jitter(self, rows, step):
        """Factors of (tokens, features), which depend on no grid."""
        factors = torch.empty(rows.count, self.features, dtype=torch.float64)
        start = 0
        for run in rows.runs:
            uniform = (self.key / "jitter").uniform(run.start * self.features, len(run) * self.features, step)
            factors[start : start + len(run)] = uniform.view(len(run), self.features)
            start += len(run)
        return factors.mul_(2 * self.jitter).add_(1 - self.jitter)

    def extra_repr(self):
        return f"{self.features}, {self.experts}, top_k={self.top_k}, scores={self.scores}"


def highest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Columns of the `count` highest scores of each row, the highest first, of equal ones the first column first; which
    torch.topk does not say.

    >>> highest(torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]]), 3)
    tensor([[1, 2, 3], [0, 1, 2]])
    """
    if scores.is_cpu:  # numpy's argmax is vectorised: of 64 experts it takes a tenth of torch's time
        left, found = scores.numpy(), np.empty((len(scores), count), np.int64)
        found[:, 0] = left.argmax(1)
        if count > 1:
            left, rows = left.copy(), np.arange(len(left))
        for place in range(1, count):
            left[rows, found[:, place - 1]] = -np.inf
            found[:, place] = left.argmax(1)
        return torch.from_numpy(found)
    remaining, columns = scores.clone(), []
    for _ in range(count):
        columns.append(remaining.argmax(1, keepdim=True))
        remaining.scatter_(1, columns[-1], -torch.inf)
    return torch.cat(columns, 1)


def _check(experts, top_k, scores, groups, groups_kept, jitter):
    if scores not in ROUTERS:
        raise ValueError(f"scores must be one of {', '.join(ROUTERS)}, got {scores!r}")
    if groups < 1 or experts % groups or not 1 <= groups_kept <= groups:
        raise ValueError(
            f"groups must divide the experts, and groups_kept be some of them, got {experts} experts in {groups} "
            f"groups of which {groups_kept} are kept"
        )
    if not 1 <= top_k <= experts // groups * groups_kept:
        raise ValueError(
            f"top_k must be from 1 to {experts // groups * groups_kept}, the experts that a token may have, got {top_k}"
        )
    if not 0 <= jitter < 1:
        raise ValueError(f"jitter must be at least 0 and below 1, got {jitter}")
