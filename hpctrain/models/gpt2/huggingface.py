"""GPT-2 in Hugging Face's format: names as of `transformers.GPT2LMHeadModel`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from hpctrain.models.gpt2.shape import GPT2Shape
from hpctrain.models.huggingface import Format, Source, taken

# Our names, Hugging Face's, and whether their matrix is the transpose of ours.
_NAMES = [
    (r"wte\.weight", "transformer.wte.weight", False),
    (r"wpe\.weight", "transformer.wpe.weight", False),
    (r"blocks\.(\d+)\.(ln_[12])\.(\w+)", r"transformer.h.\1.\2.\3", False),
    (r"blocks\.(\d+)\.attention\.qkv\.(\w+)", r"transformer.h.\1.attn.c_attn.\2", True),
    (r"blocks\.(\d+)\.attention\.proj\.(\w+)", r"transformer.h.\1.attn.c_proj.\2", True),
    (r"blocks\.(\d+)\.mlp\.up\.(\w+)", r"transformer.h.\1.mlp.c_fc.\2", True),
    (r"blocks\.(\d+)\.mlp\.down\.(\w+)", r"transformer.h.\1.mlp.c_proj.\2", True),
    (r"ln_f\.(\w+)", r"transformer.ln_f.\1", False),
    (r"head\.weight", "lm_head.weight", False),
]
_ATTENTION = {
    "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False,
    "is_causal": True,
}  # fmt: skip


class GPT2Format(Format):
    # what Hugging Face leaves out of the file has the value of the first GPT-2
    defaults = {
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        **_ATTENTION,
    }
    required = _ATTENTION
    free = ("architectures", "embd_pdrop", "attn_pdrop", "resid_pdrop", "bos_token_id", "eos_token_id")
    # those of ours, and the causal masks that older files have
    known = re.compile(
        r"(transformer\.)?(wte\.weight|wpe\.weight|ln_f\.(weight|bias)|h\.\d+\.(ln_[12]|attn\.c_attn|attn\.c_proj"
        r"|mlp\.c_fc|mlp\.c_proj)\.(weight|bias)|h\.\d+\.attn\.(masked_)?bias)|lm_head\.weight"
    )
    model_types = ("gpt2",)
    prefix = "transformer."

    def config(self, shape: GPT2Shape, end_of_document: int | None) -> dict[str, Any]:
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_layer": shape.layers,
            "n_embd": shape.width,
            "n_head": shape.heads,
            "n_positions": shape.context,
            "vocab_size": shape.vocabulary,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "embd_pdrop": shape.dropout,
            "attn_pdrop": shape.dropout,
            "resid_pdrop": shape.dropout,
            "tie_word_embeddings": shape.tied,
            "bos_token_id": end_of_document,
            "eos_token_id": end_of_document,
        }

    def options(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        keys = {"layers": "n_layer", "width": "n_embd", "heads": "n_head", "context": "n_positions"}
        found = taken(settings, {**keys, "vocabulary": "vocab_size"})
        return {"kind": "gpt2", **found, "tied": settings.get("tie_word_embeddings", True)}

    def source(self, name: str, shape: GPT2Shape) -> Source:
        """
        >>> GPT2Format().source("blocks.3.mlp.up.bias", None)
        Source(names=('transformer.h.3.mlp.c_fc.bias',), rows=(), order=None, transposed=True)
        """
        ((theirs, transposed),) = (
            (match.expand(theirs), transposed)
            for pattern, theirs, transposed in _NAMES
            if (match := re.fullmatch(pattern, name))
        )
        order = None
        if ".qkv." in name:  # ours: (head, {q, k, v}, feature); theirs: ({q, k, v}, head, feature)
            order = np.arange(3 * shape.width).reshape(3, shape.heads, -1).transpose(1, 0, 2).reshape(-1)
        return Source((theirs,), (), order, transposed)
