"""Options of the model."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain import choices
from hpctrain.config.option import option
from hpctrain.models.registry import SPECS as KINDS


@dataclass
class ModelConfig:
    kind: str = option("gpt2", f"the architecture: {', '.join(KINDS)} or package.module:function of one's own")
    layers: int = option(4, "transformer blocks", low=1)
    width: int = option(128, "features of a token between blocks, a multiple of heads", low=1)
    heads: int = option(4, "attention heads", low=1)
    context: int = option(128, "tokens of a sequence", low=1)
    vocabulary: int = option(257, "rows of the embedding, at least the vocabulary of the data", low=1)
    dropout: float = option(0.0, "probability that an activation is dropped", low=0, below=1)
    tied: bool = option(True, "input and output embeddings share one table")
    kv_heads: int = option(0, "key and value heads, a divisor of heads; 0: the kind's own", low=0)
    ffn: int = option(0, "inner width of the MLP; 0: the kind's own", low=0)
    head_width: int = option(0, "features of a head; 0: width / heads", low=0)
    rope_base: float = option(0.0, "base of the rotary position embedding; 0: the kind's own", low=0)
    rope_scaling: list[float] = option(
        [],
        "Llama 3's change of the rotary frequencies: factor, low_freq_factor, high_freq_factor and original context,"
        " such as [8, 1, 4, 8192]; []: none",
        check=choices.check_rope_scaling,
    )
    window: int = option(0, "keys that a query sees, its own the last, as Mistral's sliding window; 0: all", low=0)
    norm_eps: float = option(0.0, "what RMS norms add to the mean square; 0: the kind's own", low=0)
    qkv_bias: bool = option(False, "the projection to queries, keys and values has a bias")
    qk_norm: bool = option(False, "queries and keys are normed, each head by itself")
    experts: int = option(0, "of a layer, of which each token passes through top_k; 0: the kind's own", low=0)
    top_k: int = option(0, "experts of a token; 0: the kind's own", low=0)
    expert_ffn: int = option(0, "inner width of an expert; 0: ffn", low=0)
    shared_experts: int = option(0, "experts besides that every token passes through", low=0)
    dense_layers: int = option(0, "the first layers, which have an MLP of width ffn in place of experts", low=0)
    router: str = option(
        "", "what a token's scores of the experts are of their logits; sigmoid: with a bias that chooses, but does not "
        'weigh, as in DeepSeek-V3; "": the kind\'s own', choices=("", *choices.ROUTERS),
    )  # fmt: skip
    router_groups: list[int] = option(
        [],
        "[groups, kept]: a token's experts are of the groups whose two best scores add up to the most; []: of all",
        check=choices.check_router_groups,
    )
    router_scale: float = option(0.0, "what weights of experts are multiplied by; 0: 1", low=0)
    router_unnormalized: bool = option(False, "the weights of a token's experts are not divided by their sum")
    router_jitter: float = option(
        0.0, "half the width of the range around 1 of random factors of the router's input, in training", low=0, below=1
    )
    aux_loss: float = option(0.0, "coefficient of the Switch loss, which balances the experts", low=0)
    aux_scope: str = option(
        "", "what it balances: the tokens of each sequence (sequence, the default), or all of a step (step), for which "
        "no backward may come before the last forward: one microbatch, or gpipe", choices=("", *choices.AUX_SCOPES),
    )  # fmt: skip
    z_loss: float = option(0.0, "coefficient of the squared logarithm of the router's normaliser", low=0)
    balance_bias: float = option(
        0.0,
        "by how much an expert's bias rises or falls after a step in which it had fewer or more tokens than the mean",
        low=0,
    )
    capacity: float = option(
        0.0,
        "tokens that an expert takes of a sequence, as a multiple of the mean; those beyond it are dropped; 0: all",
        low=0,
    )
    capacity_policy: str = option(
        "", 'which tokens it keeps: those with the highest scores (probability, the default), or the first ones',
        choices=("", *choices.DROP_POLICIES),
    )  # fmt: skip
    init: str = option(
        "", "start from this folder in Hugging Face's format (config.json, model.safetensors), of the same sizes"
    )
