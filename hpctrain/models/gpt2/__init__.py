"""GPT-2.

Source: Radford et al., "Language models are unsupervised multitask learners" (2019).
"""

import importlib

from hpctrain.models.gpt2.shape import GPT2Shape

__all__ = ["GPT2", "GPT2Shape"]


def __getattr__(name):
    if name == "GPT2":  # brings torch, which configurations are checked without
        return importlib.import_module("hpctrain.models.gpt2.model").GPT2
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
