"""Which experts each token goes to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hpctrain.layers.experts.record import Record
from hpctrain.layers.experts.whole_rows import WholeRows


@dataclass(frozen=True)
class Routing:
    """What `Router` gives `Experts`: of this rank's tokens, the experts and what their outputs count.

    Attributes:
        experts: (tokens, top_k) int64, the most probable first, of equal ones that of the lower number.
        weights: (tokens, top_k), float32 at least; differentiable.
        counts: (all experts,) int64, how many pairs of a token and an expert each has.
        scores: (tokens, all experts), before weights are made of them; not differentiable.
        x: the tokens, for the experts alone; see `scores.weigh`.
        rows: which tokens these are.
        record: of the layer's load.
    """

    experts: torch.Tensor
    weights: torch.Tensor
    counts: torch.Tensor
    scores: torch.Tensor
    x: torch.Tensor
    rows: WholeRows
    record: Record
