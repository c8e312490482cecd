"""Which modules do just what their type says, so that ours may stand in for their forward."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, TypeGuard, TypeVar, overload

import torch
import torch.nn.functional as F
from torch import nn

M = TypeVar("M", bound=nn.Module)

# They treat every feature by itself.
POINTWISE = (
    nn.CELU, nn.Dropout, nn.ELU, nn.GELU, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.Identity, nn.LeakyReLU,
    nn.LogSigmoid, nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Softsign, nn.Tanh,
)  # fmt: skip


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

# What a subclass may have of its own without another forward.
_HARMLESS = {
    "__init__", "__doc__", "__module__", "__annotations__", "__constants__", "__parameters__", "__orig_bases__",
    "__firstlineno__", "__static_attributes__", "__annotate_func__", "__repr__", "extra_repr", "reset_parameters",
    "_reset_parameters",
}  # fmt: skip

# Of a module without weights, which only renames those of its children.
_OLDER_FILES = {"_version", "_load_from_state_dict"}


def works_as(kind: type, base: type, own: str = "") -> bool:
    """Whether modules of type `kind` compute what those of type `base` do: `base` itself, or heirs that change nothing
    but for the method `own`.

    >>> works_as(nn.modules.linear.NonDynamicallyQuantizableLinear, nn.Linear), works_as(nn.LazyLinear, nn.Linear)
    (True, False)
    """
    if not issubclass(kind, base):
        return False
    names = {*dir(base), "weight", "bias"} - _HARMLESS - {own}
    if base is nn.Sequential:
        names -= _OLDER_FILES
    heirs = (other for other in kind.__mro__ if other not in base.__mro__)
    return all(names.isdisjoint(vars(heir)) for heir in heirs)


def is_hooked(module: nn.Module) -> bool:
    """Whether somebody is shown its activations, who expects whole ones, be it a forward that was put in the place of
    its own. (ZeRO-3 has hooks of ours.)"""
    if "forward" in vars(module):
        return True
    found = (hook for hooks in _HOOKS for hook in getattr(module, hooks).values())
    return any(not getattr(hook, "__module__", "").startswith("hpctrain.") for hook in found)


def altered(module: nn.Module) -> str:
    """What was done to a module beside its type; "" where nothing was."""
    for name, value in vars(module).items():
        if isinstance(value, torch.Tensor) and any(other.startswith(f"{name}_") for other in module._parameters):
            return f"its {name} is computed from other parameters; remove the weight_norm, spectral_norm or pruning"
    return "its forward was replaced" if "forward" in vars(module) else ""


def children_and_functions(owner: nn.Module) -> list[tuple[Any, str, Any]]:
    """What it calls: the owner, the name of its attribute and the value of each."""
    own = {name: value for name, value in vars(owner).items() if inspect.isroutine(value)}
    return [(owner, name, value) for name, value in {**owner._modules, **own}.items()]


def those_with(module: nn.Module, planned: Iterable[tuple[Any, str, Any]]) -> list[tuple[Any, str, Any]]:
    """Of such values, the module itself and those that have it."""
    return [each for each in planned if isinstance(each[2], nn.Module) and module in each[2].modules()]


def arguments(module: nn.Module, others: bool = False) -> list[str]:
    """Those that its forward takes, by place or by name; none where it takes any in another way, but for any number of
    `others` where these are allowed."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    if others:
        parameters = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    known = all(each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters)
    return [each.name for each in parameters] if known else []


def is_of_huggingface(module: nn.Module) -> bool:
    return type(module).__module__.startswith("transformers.")


def is_of_diffusers(module: nn.Module) -> bool:
    return type(module).__module__.startswith("diffusers.")


@overload
def is_plain(module: nn.Module, kind: type[M]) -> TypeGuard[M]: ...
@overload
def is_plain(module: nn.Module, kind: str) -> bool: ...
def is_plain(module: nn.Module, kind: type[nn.Module] | str) -> bool:
    """Whether it works as a type, given by name where it is Hugging Face's, and nothing was done to it; a layer with
    hooks is not."""
    found = type(module)
    if isinstance(kind, str):
        same = found.__name__ == kind and found.__module__.startswith("transformers.")
    else:
        same = works_as(found, kind)
    layer = kind == "Conv1D" or not isinstance(kind, str)
    return same and not altered(module) and not (layer and is_hooked(module))


def is_one_of(module: nn.Module, kinds: Iterable[type | str]) -> bool:
    """Whether it is plain, of any of these."""
    return any(is_plain(module, kind) for kind in kinds)


def is_pointwise(activation: Any) -> bool:
    """Whether an activation treats every feature by itself, and shows them to nobody. Dropout draws for the features it
    is given."""
    kind = type(activation)
    if isinstance(activation, nn.Module) and is_hooked(activation):
        return False
    if activation in (F.relu, F.gelu, F.silu, torch.relu, torch.tanh, torch.sigmoid):
        return True
    if kind.__module__ == "transformers.activations":
        return not list(activation.parameters())
    return kind in POINTWISE and kind is not nn.Dropout
