"""Optimizers by name, and the average of the weights that they may keep."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hpctrain import comm
from hpctrain.choices import check_optimizer
from hpctrain.parameter import shard_of


def make_optimizer(
    parameters: Iterable[torch.nn.Parameter], weight_decay: float, name: str = "adamw", momentum: float = 0.9,
    betas: Sequence[float] = (0.9, 0.95), eps: float = 1e-8, ema_decay: float = 0.0,
) -> torch.optim.Optimizer:  # fmt: skip
    """The optimizer of this name, one of `hpctrain.choices.OPTIMIZERS`, in torch's fused or foreach implementation.

    Weights decay, vectors (biases and norms) do not: with adamw, nadam and radam beside the update (decoupled), with
    the others as part of the gradient.

    Args:
        momentum: of sgd (Nesterov's) and rmsprop.
        betas, eps: of Adam and its kin.
        ema_decay: the part of an average of the weights that a step keeps; 0 for no average. It is the optimizer's
            state "ema" of each parameter, starts as the weights before the first step, and is divided over ranks, saved
            and loaded as the rest of the state is.

    Raises:
        ValueError: for another name, with the reason where the optimizer is known.
    """
    check_optimizer(name)
    parameters = list(parameters)
    matrices = [p for p in parameters if len(shard_of(p).global_shape) > 1]
    vectors = [p for p in parameters if len(shard_of(p).global_shape) < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    adam = {"betas": tuple(betas), "eps": eps}
    kinds: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
        "adamw": (torch.optim.AdamW, {**adam, "fused": True}),
        "adam": (torch.optim.Adam, {**adam, "fused": True}),
        "nadam": (torch.optim.NAdam, {**adam, "decoupled_weight_decay": True, "foreach": True}),
        "radam": (torch.optim.RAdam, {**adam, "decoupled_weight_decay": True, "foreach": True}),
        "adamax": (torch.optim.Adamax, {**adam, "foreach": True}),
        "adagrad": (torch.optim.Adagrad, {"foreach": True}),
        "rmsprop": (torch.optim.RMSprop, {"momentum": momentum, "foreach": True}),
        "sgd": (torch.optim.SGD, {"momentum": momentum, "nesterov": momentum > 0, "fused": True}),
    }
    kind, settings = kinds[name]
    kind = _eager(kind)
    if ema_decay:
        kind = _averaging(kind, ema_decay)
    return kind(groups, **settings)


def _eager(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """The same optimizer without the wrappers that keep torch's compiler away from it: to do so they import the whole
    compiler, 800 modules and two seconds, on every rank of every job."""
    bare = {name: inspect.unwrap(getattr(kind, name)) for name in ("step", "add_param_group", "zero_grad")}
    return type(kind.__name__, (kind,), {**bare, "step": torch.no_grad()(bare["step"])})


def _averaging(kind: type[torch.optim.Optimizer], decay: float) -> type[torch.optim.Optimizer]:
    """The same optimizer, which keeps a moving average of the weights, in float32 where they have 16 bits."""

    @torch.no_grad()
    def step(self, closure=None):
        changed = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        wide = {p: comm.accumulation_dtype(p.dtype) for p in changed}
        before = {p: p.detach().to(wide[p], copy=True) for p in changed if "ema" not in self.state[p]}
        result = kind.step(self, closure)  # which makes the rest of a state where it is empty
        for p, weights in before.items():
            self.state[p]["ema"] = weights
        if changed:
            averages = [self.state[p]["ema"] for p in changed]
            torch._foreach_lerp_(averages, [p.detach().to(wide[p]) for p in changed], 1 - decay)
        return result

    return type(kind.__name__, (kind,), {"step": step})
