"""Fused experts spread over ranks by `grid.expert`: tokens travel to their experts and back, as in `layers.experts`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hpctrain import comm
from hpctrain.comm.functional import with_adjoint
from hpctrain.convert.boundary import gather, take
from hpctrain.convert.expert_form import ExpertForm
from hpctrain.convert.pretrained import DividedPretrained
from hpctrain.convert.sharded_activation import whole
from hpctrain.convert.sharding import local
from hpctrain.grid import Axis
from hpctrain.layers.experts.dispatch import Dispatch
from hpctrain.layers.experts.dispatch_choice import choose
from hpctrain.layers.experts.grouped import products, weight_gradients
from hpctrain.once_differentiable import once_differentiable
from hpctrain.shard import split_sizes


class SpreadExperts(torch.nn.Module):
    """Mixin for experts of Hugging Face's interface: each rank has some of them.

    All ranks of the tensor axis have the same tokens, and each takes a part of them to the experts. The backward of
    every rank passes here, whether its experts had tokens or not.

    Attributes: `tensor`, `expert`, the axes; `experts`, of all ranks; `form`, of their matrices.
    """

    tensor: Axis
    expert: Axis
    experts: int
    form: ExpertForm

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
            return gather(apply_experts(self, self.form, x, weights, dispatch), self.tensor, counts, 0)


class SpreadPretrained(DividedPretrained):
    """Mixin for a PreTrainedModel that generates, with such experts: of replicas whose sequences end at different
    steps, those that have ended compute on, for nothing, until all have."""

    def generate(self, *arguments: Any, **options: Any):
        return super().generate(*arguments, **{**options, "synced_gpus": True})

    def _has_unfinished_sequences(self, this_peer_finished: bool, synced_gpus: bool, device: torch.device) -> bool:
        going_on = torch.tensor([int(not this_peer_finished)])
        return bool(comm.all_reduce(going_on, self.hpctrain_grid.world))


def apply_experts(module: Any, form: ExpertForm, x: torch.Tensor, weights: torch.Tensor, dispatch: Dispatch):
    """What the module makes of tokens, by the experts that this rank has."""
    up, down, *biases = (module._parameters[name] for name in form.names)
    rows, weight = _BothToExperts.apply(x, weights, dispatch)
    hidden = _linear(rows, up, biases[0] if biases else None, dispatch.counts, form.transposed)
    hidden = module._apply_gate(hidden) if module.has_gate else module.act_fn(hidden)
    out = _linear(hidden, down, biases[1] if biases else None, dispatch.counts, form.transposed)
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
    @once_differentiable
    def backward(ctx, grad_rows, grad_weight):
        return *ctx.dispatch.both_to_tokens(grad_rows.contiguous(), grad_weight.contiguous()).wait(), None


def _linear(rows, weight, bias, counts: Sequence[int], transposed):
    """As F.linear, of the next counts[e] rows with weight[e] and bias[e], in autocast too."""
    device = rows.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        rows, weight = rows.to(dtype), weight.to(dtype)
    y = _Linear.apply(rows, weight, counts, transposed)
    if bias is None:
        return y
    return y + bias.repeat_interleave(torch.tensor(counts, device=bias.device), 0, output_size=len(rows))


class _Linear(torch.autograd.Function):
    """Every expert gets a gradient, of zeros where no row came: all ranks sum the same ones.

    A matrix is (out, in), or (in, out) where `transposed`.
    """

    @staticmethod
    def forward(ctx, rows, weight, counts, transposed):
        ctx.save_for_backward(rows, weight)
        ctx.weight, ctx.counts, ctx.transposed = weight, counts, transposed  # as in layers.box
        return products(rows, weight.mT if transposed else weight, counts, transposed=True)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        with local():
            rows, weight, counts = ctx.saved_tensors[0], ctx.weight, ctx.counts
            grad_rows = products(grad, weight.mT if ctx.transposed else weight, counts, transposed=False)
            pair = (rows, grad) if ctx.transposed else (grad, rows)
            return grad_rows, weight_gradients(*pair, counts, torch.empty_like(weight)), None, None
