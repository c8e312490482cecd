"""Mixtral as the rest of hpctrain sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hpctrain.grid import Grid
from hpctrain.models.costs import MixtureCosts, TransformerCosts
from hpctrain.models.llama.spec import LlamaSpec, block_costs, swiglu_costs
from hpctrain.models.mixtral.shape import MixtralShape


class MixtralSpec(LlamaSpec[MixtralShape]):
    kind = "mixtral"
    experts = True
    keys = LlamaSpec.keys | {
        "experts", "top_k", "expert_ffn", "shared_experts", "dense_layers", "router", "router_groups", "router_scale",
        "router_unnormalized", "router_jitter", "aux_loss", "aux_scope", "z_loss", "balance_bias", "capacity",
        "capacity_policy",
    }  # fmt: skip

    def make_shape(self, options: Mapping[str, Any]) -> MixtralShape:
        llama = super().make_shape(options)
        experts, top_k = options["experts"] or 8, options["top_k"] or 2
        groups, kept = options["router_groups"] or (1, 1)
        shape = MixtralShape(
            **vars(llama), experts=experts, top_k=top_k, expert_ffn=options["expert_ffn"] or llama.ffn,
            shared_experts=options["shared_experts"], dense_layers=options["dense_layers"],
            router=options["router"] or "softmax", normalized=not options["router_unnormalized"], groups=groups,
            groups_kept=kept, scale=options["router_scale"] or 1.0, aux_loss=options["aux_loss"],
            aux_scope=options["aux_scope"] or "sequence", z_loss=options["z_loss"],
            balance_bias=options["balance_bias"], capacity=options["capacity"],
            capacity_policy=options["capacity_policy"] or "probability",
            jitter=options["router_jitter"],
        )  # fmt: skip
        _check(shape)
        return shape

    def build(
        self,
        grid: Grid,
        shape: MixtralShape,
        layers_per_stage: Sequence[int] | None = None,
        placement: Mapping[tuple[int, int], int] | None = None,
        **options: Any,
    ):
        from hpctrain.models.mixtral.model import Mixtral

        return Mixtral(grid, shape, layers_per_stage, placement, **options)

    def costs(self, shape: MixtralShape) -> TransformerCosts:
        shared = swiglu_costs(shape.width, shape.shared_ffn) if shape.shared_experts else ()
        mixture = MixtureCosts(
            shape.experts, shape.top_k, shape.expert_ffn, shared, shape.dense_layers,
            swiglu_costs(shape.width, shape.ffn), balanced=shape.aux_loss > 0 and shape.aux_scope == "sequence",
            step_balanced=shape.aux_loss > 0 and shape.aux_scope == "step",
        )  # fmt: skip
        return block_costs(shape, (), mixture)

    def shorter(self, shape: MixtralShape) -> tuple[MixtralShape, list[int]]:
        if not shape.dense_layers:
            return super().shorter(shape)
        others, mixed = shape.dense_layers - 1, shape.layers - shape.dense_layers
        dense = 1 + (others > 0)
        pieces = dense + min(2, mixed)
        like = [0, *[1] * others, *[dense] * (mixed - 1), pieces - 1]
        return replace(shape, layers=pieces, dense_layers=dense), like

    @property
    def huggingface(self):
        from hpctrain.models.mixtral.huggingface import MixtralFormat

        return MixtralFormat()

    def describe(self, shape: MixtralShape) -> str:
        more = f" and {shape.shared_experts} shared" if shape.shared_experts else ""
        dense = f", {shape.dense_layers} dense layers with ffn {shape.ffn}" if shape.dense_layers else ""
        window = f", window {shape.window}" if shape.window else ""
        return (
            f"{self.kind}: {shape.layers} layers, width {shape.width}, {shape.heads} heads of {shape.head_width}, "
            f"{shape.kv_heads} of keys, {shape.experts} experts with ffn {shape.expert_ffn} of which a token has "
            f"{shape.top_k}{more}{dense}, context {shape.context}{window}, vocabulary {shape.vocabulary}"
        )


def _check(shape: MixtralShape) -> None:
    """Raise ValueError for sizes that do not fit together, and for a shape that no model of Hugging Face's has."""
    if shape.top_k > shape.experts:
        raise ValueError(f"model.top_k must be at most model.experts = {shape.experts}, got {shape.top_k}")
    if shape.dense_layers >= shape.layers:
        raise ValueError(
            f"model.dense_layers must leave a layer of experts, of model.layers = {shape.layers}, got "
            f"{shape.dense_layers}"
        )
    groups, kept = shape.groups, shape.groups_kept
    if shape.experts % groups or kept > groups or shape.top_k > kept * (shape.experts // groups):
        raise ValueError(
            f"model.router_groups = [groups, kept] must divide model.experts = {shape.experts} into groups, of which "
            f"those that are kept have model.top_k = {shape.top_k} experts, got {[groups, kept]}"
        )
    sigmoid = {
        "model.router_groups": groups > 1 and [groups, kept],
        "model.router_scale": shape.scale != 1 and shape.scale,
        "model.shared_experts": shape.shared_experts,
        "model.balance_bias": shape.balance_bias,
        "model.qkv_bias": shape.qkv_bias,
    }
    norm = {"model.router_unnormalized": not shape.normalized, "model.dense_layers": shape.dense_layers}
    wrong: dict[str, dict[str, Any]] = {
        'model.router = "softmax"': {} if shape.router == "sigmoid" else sigmoid,
        "model.qk_norm = false": {} if shape.router == "sigmoid" or shape.qk_norm else norm,
        'model.router = "sigmoid"': {} if shape.router == "softmax" else {"model.window": shape.window},
    }
    for has, others in wrong.items():
        for option, value in others.items():
            if value:
                raise ValueError(
                    f"{has} has no {option}, got {value}: Mixtral and Qwen3-MoE (softmax, the latter with "
                    'model.qk_norm) and DeepSeek-V3\'s mixture (model.router = "sigmoid") can be exported'
                )
