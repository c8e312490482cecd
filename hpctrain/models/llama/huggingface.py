"""Llama in Hugging Face's format, as of `transformers`' LlamaForCausalLM, and that of three of its kin.

Mistral may have a window, Qwen2 has biases of queries, keys and values, Qwen3 norms of query and key heads; these two
may have a window in all layers. An export is of the first that has the shape.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import numpy as np

from hpctrain.models.huggingface import Format, Source, taken
from hpctrain.models.llama.shape import LlamaShape

Shape = TypeVar("Shape", bound=LlamaShape)

_LAYERS = ("qwen2", "qwen3")  # each layer of which has the window or none
_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")

# Our names, and Hugging Face's one after the other.
_NAMES = [
    (r"wte\.weight", ["model.embed_tokens.weight"]),
    (r"blocks\.(\d+)\.ln_1\.weight", [r"model.layers.\1.input_layernorm.weight"]),
    (r"blocks\.(\d+)\.attention\.qkv\.(\w+)", [rf"model.layers.\1.self_attn.{part}_proj.\2" for part in "qkv"]),
    (r"blocks\.(\d+)\.attention\.([qk]_norm)\.weight", [r"model.layers.\1.self_attn.\2.weight"]),
    (r"blocks\.(\d+)\.attention\.proj\.weight", [r"model.layers.\1.self_attn.o_proj.weight"]),
    (r"blocks\.(\d+)\.ln_2\.weight", [r"model.layers.\1.post_attention_layernorm.weight"]),
    (r"blocks\.(\d+)\.mlp\.up\.weight", [rf"model.layers.\1.mlp.{part}_proj.weight" for part in ("gate", "up")]),
    (r"blocks\.(\d+)\.mlp\.down\.weight", [r"model.layers.\1.mlp.down_proj.weight"]),
    (r"ln_f\.weight", ["model.norm.weight"]),
    (r"head\.weight", ["lm_head.weight"]),
]


class LlamaFormat(Format, Generic[Shape]):
    """Of each `model_type`: its class in `architectures`, and in `left_out` what a config.json that leaves it out means
    by it, as far as that does not follow from the rest."""

    kind = "llama"
    architectures = {
        "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
    }  # fmt: skip
    model_types = tuple(architectures)
    left_out: Mapping[str, Mapping[str, Any]] = {
        "llama": {},
        "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
        "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
        "qwen3": {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
    }
    defaults = {
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False,
        "mlp_bias": False, "is_causal": True,
    }  # fmt: skip
    required = {"is_causal": True}
    free = (
        *Format.free, "model_type", "max_position_embeddings", "attention_dropout", "use_sliding_window",
        "max_window_layers",
    )  # fmt: skip
    # those of ours, and the frequencies that older files have
    known = re.compile(
        r"(model\.)?(embed_tokens\.weight|norm\.weight|layers\.\d+\.(input_layernorm\.weight|mlp\.(gate|up|down)_proj"
        r"\.weight|post_attention_layernorm\.weight|self_attn\.([qkvo]_proj\.weight|[qkv]_proj\.bias|[qk]_norm\.weight"
        r"|rotary_emb\.inv_freq)))|lm_head\.weight"
    )
    prefix = "model."

    def model_type(self, shape: Shape) -> str:
        """The name in config.json of the first architecture that has this shape."""
        if shape.qkv_bias:
            return "qwen2"
        if shape.qk_norm:
            return "qwen3"
        # Hugging Face's Llama has no window, and wants a width that is a multiple
        return "mistral" if shape.window or shape.width % shape.heads else "llama"

    def config(self, shape: Shape, end_of_document: int | None) -> dict[str, Any]:
        scaling = None
        if shape.rope_scaling:
            *factors, original = shape.rope_scaling
            scaling = {"rope_type": "llama3", **dict(zip(_SCALING, (*factors, int(original))))}
        kind = self.model_type(shape)
        return {
            "architectures": [self.architectures[kind]],
            "model_type": kind,
            "num_hidden_layers": shape.layers,
            "hidden_size": shape.width,
            "intermediate_size": shape.ffn,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_width,
            "max_position_embeddings": shape.context,
            "vocab_size": shape.vocabulary,
            "hidden_act": "silu",
            "rms_norm_eps": shape.norm_eps,
            "rope_theta": shape.rope_base,
            "rope_scaling": scaling,
            "attention_bias": False,
            "attention_dropout": shape.dropout,
            "mlp_bias": False,
            "sliding_window": shape.window or None,
            **({"use_sliding_window": True, "max_window_layers": 0} if shape.window and kind in _LAYERS else {}),
            "tie_word_embeddings": shape.tied,
            "bos_token_id": end_of_document,
            "eos_token_id": end_of_document,
        }

    def options(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        kind = settings["model_type"]
        settings = {**self.left_out[kind], **settings}
        keys = {
            "layers": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads",
            "context": "max_position_embeddings", "vocabulary": "vocab_size", "ffn": "intermediate_size",
            "norm_eps": "rms_norm_eps",
        }  # fmt: skip
        found = taken(settings, keys)
        for ours, theirs in (("kv_heads", "num_key_value_heads"), ("head_width", "head_dim")):
            found[ours] = settings.get(theirs) or _derived(settings, theirs)
        base, scaling = _rotary(settings)
        if scaling is not None and not (isinstance(scaling, dict) and scaling["rope_type"] == "llama3"):
            raise ValueError(f"config.json scales rotary frequencies by {scaling}; only rope_type llama3 is computed")
        found["rope_scaling"] = [] if scaling is None else list(taken(scaling, {key: key for key in _SCALING}).values())
        if isinstance(window := self.window(settings, kind, found["layers"]), int):  # else `differences` refuses it
            found["window"] = window
        tied, of = settings.get("tie_word_embeddings", False), {"qwen2": "qkv_bias", "qwen3": "qk_norm"}.get(kind)
        return {"kind": self.kind, **found, "rope_base": base, "tied": tied, **({of: True} if of else {})}

    def source(self, name: str, shape: Shape) -> Source:
        """
        >>> LlamaFormat().source("blocks.3.mlp.down.weight", None).names
        ('model.layers.3.mlp.down_proj.weight',)
        """
        (names,) = (
            tuple(match.expand(part) for part in theirs)
            for pattern, theirs in _NAMES
            if (match := re.fullmatch(pattern, name))
        )
        if ".qkv." in name:
            return Source(names, *_queries_keys_values(shape))
        if ".mlp.up." in name:  # ours: (feature, {gate, up}); theirs: ({gate, up}, feature)
            return Source(names, (shape.ffn, shape.ffn), np.arange(2 * shape.ffn).reshape(2, -1).T.reshape(-1))
        return Source(names)

    def differences(self, settings: Mapping[str, Any], shape: Shape) -> list[str]:
        kind = settings.get("model_type")
        if not isinstance(kind, str) or kind not in self.architectures:
            return [f"model_type = {kind}, not one of {', '.join(self.architectures)}"]
        settings = {**self.left_out[kind], **settings}
        wrong = self.other_kind(kind, shape)
        for key in ("num_key_value_heads", "head_dim"):
            if settings.get(key) is None:
                settings[key] = _derived(settings, key)
        settings["sliding_window"] = self.window(settings, kind, shape.layers)
        settings["rope_theta"], settings["rope_scaling"] = _rotary(settings)
        return wrong + super().differences(settings, shape)

    def window(self, settings: Mapping[str, Any], kind: str, layers: int) -> Any:
        """Of all layers, None for no window; in words where some have one and others none."""
        if kind == "llama" or (kind in _LAYERS and not settings.get("use_sliding_window")):
            return None
        window, first = settings["sliding_window"], settings.get("max_window_layers")
        if kind == "mistral" or window is None:
            return window
        types = settings.get("layer_types")
        if not isinstance(types, list):
            sliding = [isinstance(first, int) and first <= 0, isinstance(first, int) and first < layers]
        else:
            sliding = [each == "sliding_attention" for each in types]
        if any(sliding) and not all(sliding):
            return f"{window} in some layers alone"
        return window if any(sliding) else None

    def other_kind(self, kind: str, shape: Shape) -> list[str]:
        """How this shape is none of the architecture that a config.json is of; one text each."""
        return [
            f"model_type = {kind}, not one {'with' if has else 'without'} model.{option}"
            for option, has, by in (("qkv_bias", shape.qkv_bias, "qwen2"), ("qk_norm", shape.qk_norm, "qwen3"))
            if has != (kind == by)
        ]


def _queries_keys_values(shape: LlamaShape) -> tuple[tuple[int, ...], np.ndarray]:
    """Rows of their three tensors, and where ours are among them: ours are ordered (group, {queries…, key, value},
    feature), theirs ({q, k, v}, head, feature)."""
    groups, width = shape.kv_heads, shape.head_width
    rows = (shape.heads * width, groups * width, groups * width)
    queries, keys, values = np.split(np.arange(sum(rows)), np.cumsum(rows)[:2])
    parts = [part.reshape(groups, -1, width) for part in (queries, keys, values)]
    return rows, np.concatenate(parts, 1).reshape(-1)


def _derived(settings: Mapping[str, Any], key: str) -> Any:
    """What Hugging Face takes for a size that is not stated."""
    heads = settings.get("num_attention_heads")
    if key == "num_key_value_heads":
        return heads
    width = settings.get("hidden_size")
    return width // heads if isinstance(width, int) and isinstance(heads, int) and heads > 0 else None


def _rotary(settings: Mapping[str, Any]) -> tuple[Any, Any]:
    """Base and scaling, which newer files keep together under rope_parameters; no scaling is None."""
    found = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    if not isinstance(found, dict):
        return settings.get("rope_theta"), found
    scaling = {key: value for key, value in found.items() if key not in ("rope_theta", "type")}
    scaling.setdefault("rope_type", found.get("type", "default"))
    theta = found.get("rope_theta", settings.get("rope_theta", 10000.0))
    return theta, None if scaling == {"rope_type": "default"} else scaling
