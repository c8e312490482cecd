"""What a transformer computes and moves, in numbers: from these follow the formulas of `plan` and `scale`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LinearCosts:
    """One `layers.Linear`, or several side by side with the same input.

    Attributes:
        to_inner: from the residual to the inner layout; otherwise back.
    """

    n_in: int
    n_out: int
    to_inner: bool
    bias: bool


@dataclass(frozen=True)
class MixtureCosts:
    """What blocks have after attention where that is a mixture of experts, each of three matrices (SwiGLU).

    Attributes:
        experts, top_k: of a block, and those that a token passes through.
        ffn: inner width of an expert.
        shared: products that every token passes through beside them.
        dense_layers: blocks, the first ones, that have the products `dense` in place of all this.
        balanced: routers count the experts of each sequence, for an auxiliary loss.
        step_balanced: they count those of the whole step.
    """

    experts: int
    top_k: int
    ffn: int
    shared: tuple[LinearCosts, ...] = ()
    dense_layers: int = 0
    dense: tuple[LinearCosts, ...] = ()
    balanced: bool = False
    step_balanced: bool = False


@dataclass(frozen=True)
class TransformerCosts:
    """A token embedding, blocks, a final norm, and a projection onto the vocabulary without bias. Blocks are alike, but
    for the first ones of a mixture of experts.

    Attributes:
        linears: that every block has.
        heads: query heads; 0 without attention.
        kv_heads: key and value heads, a divisor of them.
        attention_width: features of all query heads together.
        norms: of a block, over the residual stream; the final one comes on top.
        rms_norm: norms are RMSNorm, otherwise LayerNorm with bias.
        head_norm_elements: parameters of a block's norms of attention heads; every tensor rank holds all.
        positions: rows of a learned position table; 0 for none.
        tied: the projection onto the vocabulary is the token embedding.
        window: keys that a query sees at most; 0 for all of the context.
        mixture: what blocks have besides.
    """

    layers: int
    width: int
    context: int
    vocabulary: int
    linears: tuple[LinearCosts, ...]
    heads: int = 0
    kv_heads: int = 0
    attention_width: int = 0
    norms: int = 2
    rms_norm: bool = False
    head_norm_elements: int = 0
    positions: int = 0
    tied: bool = True
    window: int = 0
    mixture: MixtureCosts | None = None

    def sequence_elements(self, rows: float, ring: int, ulysses: int, columns: int = 1) -> tuple[float, float]:
        """Elements that a rank receives over the ring and the Ulysses axis in the attention of a block, forward and
        backward, for `rows` tokens of its own; `columns` tensor ranks divide the heads.

        Ulysses: queries, keys, values and the result, and in backward their gradients. Ring: keys and values twice, and
        the sums of their gradients. Exact where sizes divide, and where each Ulysses rank needs one head of keys.
        """
        if not self.heads:
            return 0, 0
        width, kv_heads = self.attention_width / self.heads, self.kv_heads / columns
        queries = width * self.heads / columns / ulysses
        keys = width * max(1, kv_heads / ulysses)  # each rank is given just the heads that its queries need
        return 6 * (ring - 1) * ulysses * rows * keys, 4 * (ulysses - 1) * rows * (queries + keys)

    @property
    def keys(self) -> int:
        """That a query sees at most."""
        return min(self.window or self.context, self.context)

    @property
    def dense_layers(self) -> int:
        """Blocks, the first ones, without a mixture where others have one."""
        return self.mixture.dense_layers if self.mixture else 0

    def linears_of(self, dense: bool = False) -> tuple[LinearCosts, ...]:
        """Products that every token passes through in a block, or in one of the `dense_layers`."""
        if not self.mixture:
            return self.linears
        return self.linears + (self.mixture.dense if dense else self.mixture.shared)

    @property
    def router_weights(self) -> int:
        """Elements of the router of a block with a mixture."""
        return self.mixture.experts * self.width if self.mixture else 0

    @property
    def expert_weights(self) -> int:
        """Elements of the matrices of one expert."""
        return 3 * self.mixture.ffn * self.width if self.mixture else 0

    def block_weights(self, dense: bool = False, active: bool = False) -> int:
        """Elements of the matrices of a block, or of one of the `dense_layers`; with `active`, of those alone that
        multiply a token."""
        weights = sum(linear.n_in * linear.n_out for linear in self.linears_of(dense))
        if self.mixture and not dense:
            experts = self.mixture.top_k if active else self.mixture.experts
            weights += self.router_weights + experts * self.expert_weights
        return weights

    @property
    def flops_per_token(self) -> float:
        """Floating-point operations of a training step a token: forward, and twice that backward.

        Source: Chowdhery et al., "PaLM" (2022), appendix B: 6 a weight, and 12 × layers × width × keys for
        attention, where the causal mask is not taken off; the embeddings multiply nothing, and of experts only those
        that the token passes through.
        """
        dense = self.dense_layers
        weights = (self.layers - dense) * self.block_weights(active=True) + dense * self.block_weights(dense=True)
        weights += self.vocabulary * self.width
        return 6.0 * weights + 12.0 * self.layers * self.attention_width * self.keys
