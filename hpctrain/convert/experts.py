"""The fused experts of mixtures, whatever their class: divided by expert, or by hidden features.

By expert where the grid spreads them over ranks (`grid.expert`), those of Hugging Face's interface. Otherwise each rank
of the tensor axis has some hidden features of every expert, and where a module is one stack of linear layers alone,
some of their output features.
"""

from __future__ import annotations

import copy
import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parameter import is_lazy

from hpctrain.convert.boundary import enter, gather, leave
from hpctrain.convert.expert_form import (
    FEATURES,
    ExpertForm,
    adds_up,
    has_nothing_else,
    numbers,
    same,
    sorted_form,
    stack_dim,
    tried,
    twin,
)
from hpctrain.convert.gathered_weights import other_weights
from hpctrain.convert.hooks import check_global_hooks, check_hooks
from hpctrain.convert.plain import altered
from hpctrain.convert.pretrained import is_pretrained
from hpctrain.convert.sharded_activation import whole
from hpctrain.convert.sharding import local
from hpctrain.convert.spread_experts import SpreadExperts, apply_experts
from hpctrain.grid import Axis, Grid
from hpctrain.layers.experts.dispatch import Dispatch
from hpctrain.parameter import shard_of

if TYPE_CHECKING:
    from hpctrain.convert.plan import Plan

_EXPERTS, _WIDTH = 3, 4  # of a twin
# Which of three experts each of five tokens chose; number 3 is none of them.
_CHOSEN = [[0, 2], [2, 1], [1, 0], [0, 1], [1, 2]]
_CHOSEN_WITH_NONE = [[0, 2], [2, 1], [1, 0], [0, 3], [3, 2]]


class SplitExperts(nn.Module):
    """Mixin for experts in two stacks of matrices: each rank has some hidden features of every one, and adds its part
    of the last bias to its summand.

    Attributes: `axis`; `form`, of their matrices.
    """

    axis: Axis
    form: ExpertForm
    path: str

    def forward(self, *args: Any, **kwargs: Any):
        args, kwargs = whole((args, kwargs))
        if self.axis.size > 1:
            check_global_hooks()
            for child in self.children():
                check_hooks(child, self.path)
        with local():
            entered = [self._enter(x) for x in args], {key: self._enter(x) for key, x in kwargs.items()}
            with other_weights(self, self._last_bias()):
                return leave(super().forward(*entered[0], **entered[1]), self.axis)

    def _enter(self, x):
        return enter(x, self.axis) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    def _last_bias(self) -> dict[str, torch.Tensor]:
        """Zeros, where other ranks have it."""
        if not self.form.biased or self.axis.size == 1:
            return {}
        name = self.form.names[-1]
        bias: Any = self._parameters[name]
        part, width = shard_of(bias).slices[1], shard_of(bias).global_shape[1]
        return {name: F.pad(bias, (part.start, width - part.stop))}


class SplitStack(nn.Module):
    """Mixin for a stack of linear layers that takes rows, and how many of them are each layer's: each rank has some
    output features of every one.

    Attributes: `axis`; `counts`, of features by rank.
    """

    axis: Axis
    counts: tuple[int, ...]

    def forward(self, rows: torch.Tensor, sizes: Any):
        (rows,) = whole((rows,))
        with local():
            return gather(super().forward(enter(rows, self.axis), sizes), self.axis, self.counts, rows.dim() - 1)


def split_experts(plan: Plan, module: Any) -> bool:
    """Whether the module was some, divided now."""
    weights = [weight for weight in module._parameters.values() if weight is not None]
    if any(map(is_lazy, weights)) or all(weight.dim() != 3 for weight in weights):
        return False
    forms = _interface_forms(module)
    if plan.grid.expert.size > 1 and (spread := [form for form in forms if is_experts(module, form)]):
        _spread(plan, module, spread[0])
        return True
    form = next((form for form in forms if _divides(module, form)), None) or sorted_form(module)
    if form is not None:
        hidden = module._parameters[form.down].shape[form.hidden_dim(form.down)]
        parts = plan.parts(hidden)
        for name in form.names[:3]:
            unit, fused = (1, 1) if name == form.down else (form.unit, form.fused)
            scaled = [slice(unit * part.start, unit * part.stop) for part in parts]
            plan.split(module, name, form.hidden_dim(name), scaled, fused)
        if form.biased:
            plan.split(module, form.names[3], 1)
        plan.swap_class(module, SplitExperts, axis=plan.axis, form=form)
    elif (dim := stack_dim(module)) is not None:
        name, weight = next((name, weight) for name, weight in module._parameters.items() if weight is not None)
        plan.split(module, name, dim)
        counts = tuple(part.stop - part.start for part in plan.parts(weight.shape[dim]))
        plan.swap_class(module, SplitStack, axis=plan.axis, counts=counts)
    return module in plan.claimed


def is_experts(module: Any, form: ExpertForm) -> bool:
    """Whether it computes what `SpreadExperts` does."""
    stacks, x, weights = _given(form)
    made, found = _twin(module, stacks, module.training), []
    for chosen in (torch.tensor(_CHOSEN), torch.tensor(_CHOSEN_WITH_NONE)):
        given = tried(lambda chosen=chosen: made.forward(x, chosen, weights))
        if given is not None:  # some take no number that is of none
            dispatch = Dispatch(_Alone(), chosen, (_EXPERTS,))
            found.append((given, tried(lambda d=dispatch: apply_experts(made, form, x, weights, d))))
    return bool(found) and all(same(*pair) for pair in found)


def _interface_forms(module) -> list[ExpertForm]:
    """What the matrices of a module may be that transformers' own interface of experts stands in for."""
    said = all(hasattr(module, name) for name in ("config", "has_gate", "is_transposed", "has_bias"))
    # older releases have no norm after experts, and do not say so
    if not said or getattr(module, "has_post_expert_norm", False) or altered(module):
        return []
    up = "gate_up_proj" if module.has_gate else "up_proj"
    layouts = ((2, 1), (1, 2)) if module.has_gate else ((1, 1),)
    forms = [ExpertForm(up, "down_proj", module.is_transposed, *layout, module.has_bias) for layout in layouts]
    return forms if has_nothing_else(module, forms[0].names) else []


def _given(form):
    """Stacks, tokens and their weights."""
    stacks = form.random(_EXPERTS, _WIDTH, FEATURES, _WIDTH)
    return stacks, numbers(len(_CHOSEN), _WIDTH, seed=4), numbers(len(_CHOSEN), 2, seed=5)


def _twin(module, stacks, training):
    config = copy.copy(module.config)
    config._experts_implementation_internal = "eager"
    return twin(module, stacks, training, num_experts=_EXPERTS, config=config)


def _divides(module, form) -> bool:
    stacks, x, weights = _given(form)
    return adds_up(form, stacks, functools.partial(_twin, module), x, torch.tensor(_CHOSEN), weights)


class _Alone(Axis):
    """Of one rank, without a communicator."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1


def _spread(plan, module, form):
    if plan.grid.pipeline.size > 1:
        raise ValueError(f"its experts are spread over ranks of one stage; got pipeline={plan.grid.pipeline.size}")
    if plan.grid.expert_tensor > 1:
        raise ValueError(
            f"its experts are spread whole, got expert_tensor={plan.grid.expert_tensor}; use 1, or expert=1, where "
            "the tensor ranks divide each of them"
        )
    for name in form.names:
        plan.spread(module, name)
    experts = len(module._parameters[form.down])
    plan.swap_class(module, SpreadExperts, tensor=plan.grid.tensor, expert=plan.grid.expert, experts=experts, form=form)


def refuse_router_losses(model: torch.nn.Module, grid: Grid) -> None:
    """Refuse calls with `output_router_logits`: the load balancing loss is of products of means, and that of all
    replicas' tokens is not the mean of theirs."""
    if grid.data.size == 1:
        return

    def check(module, arguments, options):
        given = {**dict(zip(names[type(module)], arguments)), **options}.get("output_router_logits")
        if module.config.output_router_logits if given is None else given:
            raise ValueError(
                f"{type(module).__name__} got output_router_logits = True, whose auxiliary loss would be that of the "
                f"tokens of one of {grid.data.size} replicas; leave it out, or use data=1"
            )

    pretrained = [*filter(is_pretrained, model.modules())]
    kinds = {type(module) for module in pretrained}
    names: dict[type, list[str]] = {kind: list(inspect.signature(kind.forward).parameters)[1:] for kind in kinds}
    for module in pretrained:
        if "output_router_logits" in names[type(module)]:
            module.register_forward_pre_hook(check, with_kwargs=True)
