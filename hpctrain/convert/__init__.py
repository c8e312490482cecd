"""Torch modules into grid-parallel ones: what `ht.parallelize` does, and what a training loop needs beside it."""

from hpctrain.convert.divide import divide
from hpctrain.convert.optimizer_state import gather_optimizer_state, load_optimizer_state
from hpctrain.convert.rules import Split, register_rule
from hpctrain.convert.state_dict import gather_gradients, gather_state_dict
from hpctrain.convert.steps import clip_grad_norm_, sync_gradients

__all__ = [
    "Split",
    "clip_grad_norm_",
    "divide",
    "gather_gradients",
    "gather_optimizer_state",
    "gather_state_dict",
    "load_optimizer_state",
    "register_rule",
    "sync_gradients",
]
