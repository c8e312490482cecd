"""Mixtral in Hugging Face's format, as of `transformers`' MixtralForCausalLM, and two of its kin.

Qwen3-MoE has norms of query and key heads; GLM-4.5 has DeepSeek-V3's mixture, with sigmoids and a bias, behind plain
attention. An export is of the one that has the shape. Files hold the experts one by one, and gate and up by themselves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from hpctrain.models.huggingface import Source, taken
from hpctrain.models.llama.huggingface import LlamaFormat
from hpctrain.models.mixtral.shape import MixtralShape

# Of each model_type: what it calls the mixture of a layer, and an expert's gate, up and down
_MIXTURE = {"mixtral": "block_sparse_moe", "qwen3_moe": "mlp", "glm4_moe": "mlp"}
_EXPERT = {
    "mixtral": ("w1", "w3", "w2"),
    "qwen3_moe": ("gate_proj", "up_proj", "down_proj"),
    "glm4_moe": ("gate_proj", "up_proj", "down_proj"),
}
# Our options, and their keys of config.json
_KEYS = {
    "mixtral": {"experts": "num_local_experts", "top_k": "num_experts_per_tok", "expert_ffn": "intermediate_size"},
    "qwen3_moe": {"experts": "num_experts", "top_k": "num_experts_per_tok", "expert_ffn": "moe_intermediate_size"},
    "glm4_moe": {
        "experts": "n_routed_experts", "top_k": "num_experts_per_tok", "expert_ffn": "moe_intermediate_size",
        "shared_experts": "n_shared_experts", "dense_layers": "first_k_dense_replace",
        "router_scale": "routed_scaling_factor",
    },
}  # fmt: skip


class MixtralFormat(LlamaFormat[MixtralShape]):
    kind = "mixtral"
    architectures = {
        "mixtral": "MixtralForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "glm4_moe": "Glm4MoeForCausalLM",
    }  # fmt: skip
    model_types = tuple(architectures)
    left_out = {
        "mixtral": {
            "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
        "qwen3_moe": {
            "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
            "norm_topk_prob": False, "mlp_only_layers": [], "decoder_sparse_step": 1, "sliding_window": 4096,
        },
        "glm4_moe": {
            "num_key_value_heads": 8, "n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408,
            "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
            "routed_scaling_factor": 1.0, "norm_topk_prob": True, "use_qk_norm": False, "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
        },
    }  # fmt: skip
    # what training alone depends on, and layers that predict more than one token
    free = (*LlamaFormat.free, "router_aux_loss_coef", "router_jitter_noise", "num_nextn_predict_layers")
    known = re.compile(
        LlamaFormat.known.pattern + r"|(model\.)?layers\.\d+\.(block_sparse_moe\.(gate|experts\.\d+\.w[123])\.weight"
        r"|mlp\.(gate\.(weight|e_score_correction_bias)|(experts\.\d+|shared_experts)\.(gate|up|down)_proj\.weight))"
    )

    def model_type(self, shape: MixtralShape) -> str:
        if shape.router == "sigmoid":
            return "glm4_moe"
        return "qwen3_moe" if shape.qk_norm else "mixtral"

    def config(self, shape: MixtralShape, end_of_document: int | None) -> dict[str, Any]:
        kind = self.model_type(shape)
        ours = vars(shape) | {"router_scale": shape.scale}
        found = super().config(shape, end_of_document)
        found |= {theirs: ours[key] for key, theirs in _KEYS[kind].items()}
        if kind == "glm4_moe":
            return found | {
                "n_group": shape.groups,
                "topk_group": shape.groups_kept,
                "norm_topk_prob": shape.normalized,
                "use_qk_norm": shape.qk_norm,
                "attention_bias": shape.qkv_bias,
                "partial_rotary_factor": 1.0,
                "num_nextn_predict_layers": 0,
            }
        found["router_aux_loss_coef"] = shape.aux_loss
        if kind == "mixtral":
            return found | {"router_jitter_noise": shape.jitter}
        return found | {
            "norm_topk_prob": shape.normalized,
            "mlp_only_layers": list(range(shape.dense_layers)),
            "decoder_sparse_step": 1,
            **({"use_sliding_window": True} if shape.window else {}),
        }

    def options(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        kind = settings["model_type"]
        settings = {**self.left_out[kind], **_flat(settings)}
        found = super().options(settings) | taken(settings, _KEYS[kind])
        if kind == "mixtral":
            return found
        found["router_unnormalized"] = not settings["norm_topk_prob"]
        if kind == "qwen3_moe":
            dense = settings["mlp_only_layers"]
            return found | {"qk_norm": True, "dense_layers": len(dense) if isinstance(dense, list) else 0}
        return found | {
            "router": "sigmoid",
            "router_groups": [settings["n_group"], settings["topk_group"]],
            "qk_norm": settings["use_qk_norm"],
            "qkv_bias": settings.get("attention_bias", False),
        }

    def source(self, name: str, shape: MixtralShape) -> Source:
        """
        >>> shape = MixtralShape(layers=1, width=2, heads=1, context=1, vocabulary=1, kv_heads=1, ffn=3, head_width=2,
        ...     experts=2, top_k=1, expert_ffn=3)
        >>> MixtralFormat().source("blocks.3.mlp.experts.down", shape).names[1]
        'model.layers.3.block_sparse_moe.experts.1.w2.weight'
        """
        found = re.fullmatch(r"blocks\.(\d+)\.mlp\.(router|experts|shared)\.([\w.]+)", name)
        if not found:
            return super().source(name, shape)
        layer, part, of = found.groups()
        kind = self.model_type(shape)
        mixture, (gate, up, down) = f"model.layers.{layer}.{_MIXTURE[kind]}", _EXPERT[kind]
        if part == "router":
            return Source((f"{mixture}.gate.{'weight' if of == 'weight' else 'e_score_correction_bias'}",))
        if part == "shared":
            names = tuple(f"{mixture}.shared_experts.{each}_proj.weight" for each in ("gate", "up", "down"))
            if of == "down.weight":
                return Source(names[2:])
            order = np.arange(2 * shape.shared_ffn).reshape(2, -1).T.reshape(-1)  # as of an MLP of a Llama
            return Source(names[:2], (shape.shared_ffn, shape.shared_ffn), order)
        parts, rows = ((gate, up), shape.expert_ffn) if of == "up" else ((down,), shape.width)
        names = tuple(f"{mixture}.experts.{e}.{each}.weight" for e in range(shape.experts) for each in parts)
        return Source(names, (rows,) * len(names))

    def differences(self, settings: Mapping[str, Any], shape: MixtralShape) -> list[str]:
        return super().differences(_flat(settings), shape)

    def window(self, settings: Mapping[str, Any], kind: str, layers: int) -> Any:
        if kind == "glm4_moe" or (kind == "qwen3_moe" and not settings.get("use_sliding_window")):
            return None
        return settings.get("sliding_window")

    def other_kind(self, kind: str, shape: MixtralShape) -> list[str]:
        found = self.model_type(shape)
        return [] if kind == found else [f"model_type = {kind}, not {found}, which the section [model] is of"]


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """As older files have it: newer ones name Qwen's number of experts as Mixtral's, and have the part of a head's
    features that turn in rope_parameters."""
    settings = dict(settings)
    if settings.get("model_type") == "qwen3_moe" and "num_local_experts" in settings:
        settings["num_experts"] = settings.pop("num_local_experts")
    rope = settings.get("rope_parameters")
    if isinstance(rope, dict) and "partial_rotary_factor" in rope:
        settings["rope_parameters"] = rope = dict(rope)
        settings["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    return settings
