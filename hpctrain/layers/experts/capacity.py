"""Which pairs of a token and an expert are kept where an expert takes so many of each sequence."""

from __future__ import annotations

import math

import torch

from hpctrain.layers.experts.routing import Routing


def kept_pairs(routing: Routing, experts: int, capacity: float, capacity_policy: str) -> torch.Tensor:
    """(tokens, top_k) booleans: of each sequence an expert takes ⌈capacity · top_k · length / experts⌉ tokens at most.

    A sequence is the same group on every grid, so that the same pairs are dropped. Where ranks share sequences they
    gather all pairs' experts and scores.

    Args:
        capacity_policy: "probability" keeps those of the highest scores, of equal ones the earliest tokens; "position"
            the earliest tokens.

    Raises:
        ValueError: when sequences come in parts.

    Source: Lepikhin et al., "GShard" (2020), whose groups these are.
    """
    rows = routing.rows
    rows.check_whole_sequences("capacity")
    length, top_k = rows.tokens.whole, routing.experts.shape[1]
    limit = math.ceil(capacity * top_k * length / experts)
    device = routing.experts.device
    chosen = rows.gather_over_sequences(routing.experts)
    numbers = rows.gather_over_sequences(rows.numbers.to(device))
    groups = ((numbers // max(1, length) - rows.tokens.first)[:, None] * experts + chosen).flatten()
    # By group, in it by priority, in that by position: stable sorts, the last key first.
    order = torch.argsort(numbers.repeat_interleave(top_k), stable=True)
    if capacity_policy == "probability":
        scores = rows.gather_over_sequences(routing.scores.gather(1, routing.experts)).flatten()
        order = order[torch.argsort(scores[order], descending=True, stable=True)]
    order = order[torch.argsort(groups[order], stable=True)]
    counts = torch.bincount(groups, minlength=rows.tokens.sequences * experts)
    firsts = counts.cumsum(0) - counts
    place = torch.arange(len(order), device=device) - firsts[groups[order]]
    kept = torch.empty_like(groups, dtype=torch.bool)
    kept[order] = place < limit
    own = torch.isin(numbers, rows.numbers.to(device))
    return kept.view(-1, top_k)[own]
