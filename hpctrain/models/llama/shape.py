"""Sizes of a Llama."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of a Llama, or of one of its kin.

    Attributes:
        layers: blocks.
        width: features of the residual stream.
        heads: query heads a block.
        context: positions of a training sequence.
        vocabulary: tokens.
        kv_heads: key and value heads, a divisor of `heads`.
        ffn: inner width of the MLP.
        head_width: features of a head; even.
        rope_base: base of the rotary position embedding.
        rope_scaling: of its frequencies: factor, low_freq_factor, high_freq_factor and original context, as of
            `layers.rotary.RopeScaling`; () for none.
        window: keys that a query sees, its own the last, as in Mistral; 0 for all before it.
        norm_eps: what the norms add to the mean square.
        qkv_bias: the projection to queries, keys and values has a bias, as in Qwen2.
        qk_norm: query and key heads are normalised, as in Qwen3.
        dropout: probability, in the embedding, the attention and before each residual sum.
        tied: the output projection is the token embedding.
    """

    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int
    kv_heads: int
    ffn: int
    head_width: int
    rope_base: float = 10000.0
    rope_scaling: tuple[float, ...] = ()
    window: int = 0
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    qk_norm: bool = False
    dropout: float = 0.0
    tied: bool = True
