"""Mixtral and its kin, whose MLPs are mixtures of experts: Qwen3-MoE, and DeepSeek-V3's mixture behind plain attention
(GLM-4.5).

Source: Jiang et al., "Mixtral of experts" (2024); DeepSeek-AI, "DeepSeek-V3 technical report" (2024), §2.1.2.
"""

import importlib

from hpctrain.models.mixtral.shape import MixtralShape

__all__ = ["Mixtral", "MixtralShape"]


def __getattr__(name):
    if name == "Mixtral":  # brings torch, which configurations are checked without
        return importlib.import_module("hpctrain.models.mixtral.model").Mixtral
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
