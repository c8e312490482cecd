"""RMS norms of whatever class, in two passes over the memory instead of seven.

A norm is recognised by what it computes of random numbers: weight * (x * rsqrt(mean(x², -1) + eps)). In float32, where
nothing is rounded in between, ours takes its place; other dtypes are left to its own forward.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parameter import is_lazy

from hpctrain.convert.norms import WholeByRows, split_norm
from hpctrain.convert.plain import altered, arguments
from hpctrain.convert.plan import Plan
from hpctrain.layers.norm import RMSNormFunction


class FusedRMSNorm(nn.Module):
    """Mixin. Attribute: `eps_name`, of the module's eps."""

    eps_name: str

    def forward(self, *args: Any, **kwargs: Any):
        x: Any = (*args, *kwargs.values())[0]
        weight: Any = self._parameters["weight"]
        fits = type(x) is torch.Tensor and x.shape[-1:] == weight.shape and x.dtype == weight.dtype == torch.float32
        if not fits or torch.compiler.is_compiling():
            return super().forward(*args, **kwargs)
        eps, width = getattr(self, self.eps_name), len(weight)
        if x.is_cuda:
            return F.rms_norm(x, (width,), weight, eps)
        return _TwiceDifferentiable.apply(x.reshape(-1, width), weight, None, width, eps).view(x.shape)


class WholeRMSNorm(WholeByRows, FusedRMSNorm):
    pass


class _TwiceDifferentiable(RMSNormFunction):
    @staticmethod
    def backward(ctx, grad):
        if not torch.is_grad_enabled():
            return RMSNormFunction.backward(ctx, grad)
        x, _, weight = ctx.saved_tensors
        needed = [each for each, needs in zip((x, weight), ctx.needs_input_grad) if needs]
        found = iter(torch.autograd.grad(_by_formula(x, weight, ctx.eps), needed, grad, create_graph=True))
        return (*(next(found) if needs else None for needs in ctx.needs_input_grad[:2]), None, None, None)


def _by_formula(x, weight, eps):
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))


def split_rms_norm(plan: Plan, module: nn.Module) -> None:
    """Of a type that is known to be one."""
    if not keep_rms_norm(plan, module):
        split_norm(plan, module)


def keep_rms_norm(plan: Plan, module: nn.Module) -> bool:
    """Of any type, whose weight stays whole: whether it is one."""
    eps = _name_of_eps(module) if plan.axis.size > 1 and not any(map(plan.is_shared, module.parameters())) else None
    if eps is None:
        return False
    plan.whole(module)
    plan.swap_class(module, WholeRMSNorm, axis=plan.axis, eps_name=eps)
    return True


def _name_of_eps(module: nn.Module) -> str | None:
    """The name of the module's eps, where random numbers show that it is such a norm."""
    weight = module._parameters.get("weight")
    if weight is None or is_lazy(weight) or weight.dim() != 1 or len(module._parameters) > 1:
        return None
    if len(arguments(module)) != 1 or altered(module) or [*module.children(), *module.buffers()]:
        return None
    chance = torch.Generator().manual_seed(0)
    numbers = torch.randn(len(weight), generator=chance)
    twin, state = copy.copy(module), torch.get_rng_state()
    twin.__dict__ = {**vars(module), "_parameters": {"weight": nn.Parameter(numbers)}}
    names = [name for name, value in vars(module).items() if type(value) is float and value > 0]
    for name in names:
        eps = getattr(module, name)
        x = torch.randn(2, 3, len(weight), generator=chance) * eps**0.5  # of which eps decides
        x[1] *= 100
        try:
            with torch.no_grad():
                found = [twin.train(training).forward(x.clone()) for training in (False, True)]
        except Exception:  # whatever it does, it is not this
            return None
        finally:
            torch.set_rng_state(state)
        y = _by_formula(x, numbers, eps)
        if all(_same(z, y) for z in found):
            return name
    return None


def _same(found, expected) -> bool:
    alike = isinstance(found, torch.Tensor) and (found.dtype, found.shape) == (expected.dtype, expected.shape)
    return alike and torch.allclose(found, expected, rtol=1e-5, atol=0.0)
