"""Sizes of a GPT-2."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GPT2Shape:
    """Sizes of a GPT-2.

    Attributes:
        layers: blocks.
        width: features of the residual stream; a multiple of `heads`.
        heads: attention heads a block.
        context: positions.
        vocabulary: tokens.
        dropout: probability, in the embedding, the attention and before each residual sum.
        tied: the output projection is the token embedding.
    """

    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int
    dropout: float = 0.0
    tied: bool = True
