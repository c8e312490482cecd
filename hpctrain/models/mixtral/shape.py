"""Sizes of a Mixtral."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.models.llama.shape import LlamaShape


@dataclass(frozen=True, kw_only=True)
class MixtralShape(LlamaShape):
    """Sizes of a Llama whose MLPs are mixtures of experts, and how its tokens are routed; see `layers.experts`.

    Attributes, beside those of a Llama, whose `ffn` is that of the dense layers:
        experts: of each layer.
        top_k: experts that a token passes through.
        expert_ffn: inner width of an expert.
        shared_experts: experts besides that every token passes through, side by side.
        dense_layers: blocks, the first ones, with an MLP in place of a mixture.
        router: how scores follow from logits, "softmax" or "sigmoid"; the latter has a bias by which experts are
            chosen, but not weighed.
        normalized: the weights of a token's experts add up to `scale`; otherwise they are its scores times `scale`.
        groups, groups_kept: experts are chosen from so many groups with the highest scores.
        scale: of the weights.
        aux_loss, z_loss: coefficients of the losses that balance the experts and keep logits small.
        aux_scope: what the former balances, each "sequence" or all tokens of a "step".
        balance_bias: by how much the bias changes after a step; 0 for never.
        capacity: pairs of token and expert that an expert takes of a sequence, over the mean; 0 for all.
        capacity_policy: which pairs it takes, those with the highest scores ("probability") or the first ("position").
        jitter: half the width of the range around 1 of the factors that the router's input is multiplied by.
    """

    experts: int
    top_k: int
    expert_ffn: int
    shared_experts: int = 0
    dense_layers: int = 0
    router: str = "softmax"
    normalized: bool = True
    groups: int = 1
    groups_kept: int = 1
    scale: float = 1.0
    aux_loss: float = 0.0
    aux_scope: str = "sequence"
    z_loss: float = 0.0
    balance_bias: float = 0.0
    capacity: float = 0.0
    capacity_policy: str = "probability"
    jitter: float = 0.0

    @property
    def shared_ffn(self) -> int:
        """Inner width of the shared experts together."""
        return self.shared_experts * self.expert_ffn
