"""Computing activations once more in backward instead of keeping them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from hpctrain.layers.decisions import Decisions
from hpctrain.layers.tokens import Tokens


def recomputed(function: Callable, *arguments: Any):
    """function(*arguments), of which only the arguments are kept for backward; the gradients have the same bits.

    The first of its saved tensors that backward needs makes it run again, with its communication, on all ranks alike:
    they run the same backward. What it draws must not come from torch's generators; dropout masks here do not. What
    layers decide by `Tokens.decide`, such as which experts a token goes to, they decide once.

    Source: Chen et al., "Training deep nets with sublinear memory cost" (2016).
    """
    if not torch.is_grad_enabled():
        return function(*arguments)
    decisions = Decisions()

    def run(*arguments):
        decisions.rewind()
        return function(*arguments)

    with_decisions = [
        dataclasses.replace(each, decisions=decisions) if isinstance(each, Tokens) else each for each in arguments
    ]
    return checkpoint(run, *with_decisions, use_reentrant=False, preserve_rng_state=False)
