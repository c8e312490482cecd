"""The fused experts of Hugging Face's mixtures, whatever their class: divided by expert, or by hidden features.

By expert where the grid spreads them over ranks (`grid.expert`): tokens travel to their experts and back, as in
`layers.experts`. Otherwise each rank of the tensor axis has some hidden features of every expert.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from hpctrain import comm
from hpctrain.comm.functional import with_adjoint
from hpctrain.convert.boundary import enter, gather, leave, take
from hpctrain.convert.plain import altered, is_pointwise
from hpctrain.convert.pretrained import DividedPretrained, is_pretrained
from hpctrain.convert.sharded_activation import whole
from hpctrain.convert.sharding import local
from hpctrain.grid import Axis, Grid
from hpctrain.layers.experts.dispatch import Dispatch
from hpctrain.layers.experts.dispatch_choice import choose
from hpctrain.layers.experts.grouped import products, weight_gradients
from hpctrain.shard import split_sizes

if TYPE_CHECKING:
    from hpctrain.convert.plan import Plan

_STACKS = ("gate_up_proj", "down_proj")
# What transformers' interface of experts knows of a class, and what it must be here.
_KIND = {"has_gate": True, "has_bias": False, "has_post_expert_norm": False, "is_transposed": False}


class SplitExperts(torch.nn.Module):
    """Mixin for experts in two stacks of matrices: each rank has some hidden features of every one.

    Attribute: `axis`.
    """

    axis: Axis

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor):
        hidden_states, top_k_weights = whole((hidden_states, top_k_weights))
        with local():
            x, weights = (enter(x, self.axis) for x in (hidden_states, top_k_weights))
            return leave(super().forward(x, top_k_index, weights), self.axis)


class SpreadExperts(torch.nn.Module):
    """Mixin for the same, of which each rank has some experts.

    All ranks of the tensor axis have the same tokens, and each takes a part of them to the experts. The backward of
    every rank passes here, whether its experts had tokens or not.

    Attributes: `tensor`, `expert`, the axes; `experts`, of all ranks.
    """

    tensor: Axis
    expert: Axis
    experts: int

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor):
        hidden_states, top_k_weights = whole((hidden_states, top_k_weights))
        with local():
            counts = split_sizes(len(hidden_states), self.tensor.size)
            x, chosen, weights = (
                take(tokens, self.tensor, counts, 0).contiguous()
                for tokens in (hidden_states, top_k_index, top_k_weights)
            )
            kind = choose(self.expert, x, "auto", chosen.shape[1], self.experts)
            dispatch = kind(self.expert, chosen, split_sizes(self.experts, self.expert.size))
            up, down = (self._parameters[name] for name in _STACKS)
            return gather(_apply(self, x, weights, up, down, dispatch), self.tensor, counts, 0)


class SpreadPretrained(DividedPretrained):
    """Mixin for a PreTrainedModel that generates, with such experts: of replicas whose sequences end at different
    steps, those that have ended compute on, for nothing, until all have."""

    def generate(self, *arguments: Any, **options: Any):
        return super().generate(*arguments, **{**options, "synced_gpus": True})

    def _has_unfinished_sequences(self, this_peer_finished: bool, synced_gpus: bool, device: torch.device) -> bool:
        going_on = torch.tensor([int(not this_peer_finished)])
        return bool(comm.all_reduce(going_on, self.hpctrain_grid.world))


def _apply(module, x, weights, up, down, dispatch):
    rows, weight = _BothToExperts.apply(x, weights, dispatch)
    hidden = _linear(rows, up, dispatch.counts)
    out = _linear(module._apply_gate(hidden), down, dispatch.counts)
    return with_adjoint((out * weight[:, None]).to(x.dtype), _to_tokens, _to_experts, dispatch)


def _to_experts(x, dispatch):
    return dispatch.to_experts(x.contiguous()).wait()


def _to_tokens(rows, dispatch):
    return dispatch.to_tokens(rows.contiguous()).wait()


class _BothToExperts(torch.autograd.Function):
    """Tokens and their weights in one step, and their gradients back in one."""

    @staticmethod
    def forward(ctx, x, weights, dispatch):
        ctx.dispatch = dispatch
        return dispatch.both_to_experts(x.contiguous(), weights.contiguous()).wait()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_rows, grad_weight):
        return *ctx.dispatch.both_to_tokens(grad_rows.contiguous(), grad_weight.contiguous()).wait(), None


class _Alone(Axis):
    """Of one rank, without a communicator."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1


def _linear(rows, weight, counts: Sequence[int]):
    """As F.linear, of the next counts[e] rows with weight[e], in autocast too."""
    device = rows.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        rows, weight = rows.to(dtype), weight.to(dtype)
    return _Linear.apply(rows, weight, counts)


class _Linear(torch.autograd.Function):
    """Every expert gets a gradient, of zeros where no row came: all ranks sum the same ones."""

    @staticmethod
    def forward(ctx, rows, weight, counts):
        ctx.save_for_backward(rows, weight)
        ctx.weight, ctx.counts = weight, counts  # as in layers.box
        return products(rows, weight, counts, transposed=True)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        with local():
            rows, weight = ctx.saved_tensors[0], ctx.weight
            grad_rows = products(grad, weight, ctx.counts, transposed=False)
            return grad_rows, weight_gradients(grad, rows, ctx.counts, torch.empty_like(weight)), None


def is_experts(module: torch.nn.Module) -> bool:
    """Whether it is one of those that transformers' own interface of experts stands in for, of a kind known here, and
    computes what these do: seen by a tiny twin of it."""
    if any(getattr(module, name, None) is not known for name, known in _KIND.items()) or altered(module):
        return False
    stacks = {name: parameter.dim() for name, parameter in module._parameters.items() if parameter is not None}
    if stacks != dict.fromkeys(_STACKS, 3) or any(True for _ in module.buffers()):
        return False
    chance = torch.Generator().manual_seed(0)
    x, weights, up, down = (
        torch.randn(shape, generator=chance, dtype=torch.float64)
        for shape in ((5, 4), (5, 2), (3, 2 * 6, 4), (3, 4, 6))
    )
    chosen = torch.tensor([[0, 2], [2, 1], [1, 0], [0, 3], [3, 2]])  # of 3, the last is none
    experts: Any = module  # of Hugging Face's
    twin, config = copy.copy(experts), copy.copy(experts.config)
    config._experts_implementation_internal = "eager"
    twin.__dict__ = {
        **vars(module), "num_experts": 3, "config": config,
        "_parameters": {name: torch.nn.Parameter(stack) for name, stack in zip(_STACKS, (up, down))},
    }  # fmt: skip
    dispatch = Dispatch(_Alone(), chosen, (3,))
    with torch.no_grad():
        try:
            given, expected = twin(x, chosen, weights), _apply(module, x, weights, up, down, dispatch)
        except Exception:  # whatever it does with its weights, it is not this
            return False
    return given.shape == expected.shape and torch.allclose(given, expected, rtol=1e-9, atol=1e-9)


def split_experts(plan: Plan, module: Any) -> None:
    """Leaves alone those whose hidden features meet, where these would be divided."""
    if plan.grid.expert.size > 1:
        if plan.grid.pipeline.size > 1:
            raise ValueError(f"its experts are spread over ranks of one stage; got pipeline={plan.grid.pipeline.size}")
        if plan.grid.expert_tensor > 1:
            raise ValueError(
                f"its experts are spread whole, got expert_tensor={plan.grid.expert_tensor}; use 1, or expert=1, where "
                "the tensor ranks divide each of them"
            )
        for name in _STACKS:
            plan.spread(module, name)
        plan.swap_class(
            module, SpreadExperts, tensor=plan.grid.tensor, expert=plan.grid.expert, experts=len(module.down_proj)
        )
    elif (
        module.is_concatenated and module._apply_gate.__name__ == "_default_apply_gate" and is_pointwise(module.act_fn)
    ):
        plan.split(module, "gate_up_proj", 1, fused=2)
        plan.split(module, "down_proj", 2)
        plan.swap_class(module, SplitExperts, axis=plan.axis)


def refuse_router_losses(model: torch.nn.Module, grid: Grid) -> None:
    """Refuse calls with `output_router_logits`: the load balancing loss is of products of means, and that of all
    replicas' tokens is not the mean of theirs."""
    if grid.data.size == 1:
        return

    def check(module, arguments, options):
        given = {**dict(zip(forwards[module], arguments)), **options}.get("output_router_logits")
        if module.config.output_router_logits if given is None else given:
            raise ValueError(
                f"{type(module).__name__} got output_router_logits = True, whose auxiliary loss would be that of the "
                f"tokens of one of {grid.data.size} replicas; leave it out, or use data=1"
            )

    pretrained = filter(is_pretrained, model.modules())
    forwards = {module: list(inspect.signature(type(module).forward).parameters)[1:] for module in pretrained}
    for module, names in forwards.items():
        if "output_router_logits" in names:
            module.register_forward_pre_hook(check, with_kwargs=True)
