"""Optimizers in a loop of one's own: those that would see a part of what they need are refused before they step."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch.optim.optimizer import register_optimizer_step_pre_hook

from hpctrain.choices import MIXING_OPTIMIZERS
from hpctrain.convert.gradients import check_summed

if TYPE_CHECKING:
    import torch


@functools.cache
def watch_optimizers() -> None:
    """From now on, look at optimizers of torch's kind before their steps, and judge those whose weights are divided.

    A model does not know its optimizers, so that this is the hook that there is.
    """
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer, arguments, options) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    check_elementwise(optimizer, parameters)
    check_summed(parameters, "optimizer.step()")


def check_elementwise(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.nn.Parameter]) -> None:
    """Raise ValueError where an optimizer mixes the elements of a weight and a rank holds a part of one."""
    kinds = [kind.__name__.lower() for kind in type(optimizer).__mro__]
    mixing = [kind for kind in kinds if kind in MIXING_OPTIMIZERS]
    shards = (getattr(parameter, "shard", None) for parameter in parameters)
    if mixing and any(shard is not None and shard.shape != shard.global_shape for shard in shards):
        raise ValueError(
            f"optimizer must treat every element of a weight by itself, got {type(optimizer).__name__}, which needs "
            f"{MIXING_OPTIMIZERS[mixing[0]]}; AdamW does, and the weights of modules in replicate=[...] of "
            "ht.parallelize are whole on every rank"
        )
