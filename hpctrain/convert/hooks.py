"""Hooks that would be shown parts of activations are refused."""

from __future__ import annotations

import torch

from hpctrain.convert.plain import is_hooked


def check_hooks(module: torch.nn.Module, path: str = "") -> None:
    """Raise ValueError where a module between divided layers has hooks, unless they are ours."""
    if is_hooked(module):
        name = getattr(module, "path", f"a layer of {path}" if path else f"a module of type {type(module).__name__}")
        raise ValueError(
            f"a hook on {name}, which ht.parallelize divided together with others, would be shown a part of "
            "activations; register it before parallelize, or list the module in replicate"
        )


def check_global_hooks() -> None:
    """Raise ValueError where all modules have one, unless it is torch's, which looks at no activations."""
    if not torch.nn.modules.module._has_any_global_hook():
        return
    for name in ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks"):
        for hook in getattr(torch.nn.modules.module, f"_global_{name}").values():
            if not getattr(hook, "__module__", "").startswith(("torch.", "hpctrain.")):
                raise ValueError(
                    f"the hook {getattr(hook, '__qualname__', hook)} on all modules would be shown parts of the "
                    "activations of those that ht.parallelize divided together; register it on the modules that you "
                    "look at, before parallelize"
                )
