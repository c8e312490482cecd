"""Llama and its kin: Mistral, Qwen2 and Qwen3.

Source: Touvron et al., "Llama: open and efficient foundation language models" (2023); grouped queries and scaled
frequencies as in Grattafiori et al., "The Llama 3 herd of models" (2024).
"""

import importlib

from hpctrain.models.llama.shape import LlamaShape

__all__ = ["Llama", "LlamaShape"]


def __getattr__(name):
    if name == "Llama":  # brings torch, which configurations are checked without
        return importlib.import_module("hpctrain.models.llama.model").Llama
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
