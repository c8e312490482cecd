"""Optimizers by name, and the learning rate."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable

import torch

from hpctrain.choices import check_optimizer


def make_optimizer(
    parameters: Iterable[torch.nn.Parameter], weight_decay: float, name: str = "adamw", momentum: float = 0.9
) -> torch.optim.Optimizer:
    """The optimizer of this name, one of `hpctrain.choices.OPTIMIZERS`, in torch's fused or foreach implementation.

    Weights decay, vectors (biases and norms) do not: with adamw, nadam and radam beside the update (decoupled), with
    the others as part of the gradient. Adam and its kin have betas (0.9, 0.95).

    Args:
        momentum: of sgd (Nesterov's) and rmsprop.

    Raises:
        ValueError: for another name, with the reason where the optimizer is known.
    """
    check_optimizer(name)
    parameters = list(parameters)
    matrices = [p for p in parameters if len(p.shard.global_shape) > 1]
    vectors = [p for p in parameters if len(p.shard.global_shape) < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    adam = {"betas": (0.9, 0.95)}
    kind, settings = {
        "adamw": (torch.optim.AdamW, {**adam, "fused": True}),
        "adam": (torch.optim.Adam, {**adam, "fused": True}),
        "nadam": (torch.optim.NAdam, {**adam, "decoupled_weight_decay": True, "foreach": True}),
        "radam": (torch.optim.RAdam, {**adam, "decoupled_weight_decay": True, "foreach": True}),
        "adamax": (torch.optim.Adamax, {**adam, "foreach": True}),
        "adagrad": (torch.optim.Adagrad, {"foreach": True}),
        "rmsprop": (torch.optim.RMSprop, {"momentum": momentum, "foreach": True}),
        "sgd": (torch.optim.SGD, {"momentum": momentum, "nesterov": momentum > 0, "fused": True}),
    }[name]
    return _eager(kind)([g for g in groups if g["params"]], **settings)


def _eager(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """The same optimizer without the wrappers that keep torch's compiler away from it: to do so they import the whole
    compiler, 800 modules and two seconds, on every rank of every job."""
    bare = {name: inspect.unwrap(getattr(kind, name)) for name in ("step", "add_param_group", "zero_grad")}
    return type(kind.__name__, (kind,), {**bare, "step": torch.no_grad()(bare["step"])})


def adamw(parameters: Iterable[torch.nn.Parameter], weight_decay: float) -> torch.optim.Optimizer:
    return make_optimizer(parameters, weight_decay)


def learning_rate(step: int, steps: int, peak: float, warmup: int) -> float:
    """Linear warm-up to `peak` over `warmup` steps, then a cosine down to a tenth of it at the last of `steps`.

    >>> [round(learning_rate(step, 5, 1.0, 2), 3) for step in range(5)]
    [0.5, 1.0, 1.0, 0.55, 0.1]
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - 1 - warmup)
    return peak * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))
