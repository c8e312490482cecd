"""torch.nn.MultiheadAttention, and the feed-forward pair of torch's transformer layers: whole heads on each rank."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from hpctrain.convert.boundary import gather, leave
from hpctrain.convert.boundary_products import entering
from hpctrain.convert.box import split_pair
from hpctrain.convert.dropout import SplitDropout, kept, scaled
from hpctrain.convert.plain import altered, is_plain, is_pointwise
from hpctrain.convert.products import SplitLinear, split_matrix
from hpctrain.convert.sharded_activation import enter
from hpctrain.convert.sharding import local
from hpctrain.grid import Axis
from hpctrain.layers.softmax_attention import fused_attention, softmax_attention
from hpctrain.layout import Layout

if TYPE_CHECKING:
    from hpctrain.convert.plan import Plan


def drop_heads(p: float, heads: int, part: slice, inplace: bool = False):
    """Dropout of the probabilities of heads `part` of `heads`, as an argument of `softmax_attention`; `inplace` as
    `dropout.whole_mask` takes it."""
    if not p:
        return None

    def drop(weights):
        keep = kept((len(weights), heads, *weights.shape[2:]), p, 1, part, weights, inplace)
        if part.stop == part.start:
            return weights  # Hugging Face's GPT-2 goes on with a head of zeros
        return scaled(weights, keep, p, inplace)

    return drop


class SplitMultiheadAttention(torch.nn.MultiheadAttention):
    """Mixin for nn.MultiheadAttention.

    Attributes: `axis`; `part`, the heads of this rank; `counts`, heads by rank; `gathers`, whether `out_proj` is whole.
    """

    axis: Axis
    part: slice
    counts: tuple[int, ...]
    gathers: bool

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True, attn_mask: torch.Tensor | None = None, average_attn_weights: bool = True,
        is_causal: bool = False,
    ):  # fmt: skip
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")  # torch's own words
        if query.is_nested:
            raise ValueError("nn.MultiheadAttention of a parallelized model takes no nested tensors; pass padded ones")
        batched = query.dim() == 3
        q, k, v = self._project(query, key, value)
        if not batched:
            q, k, v = (x.unsqueeze(0) for x in (q, k, v))
        elif not self.batch_first:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        heads = self.part.stop - self.part.start, self.head_dim
        q, k, v = (x.unflatten(-1, heads).transpose(1, 2) for x in (q, k, v))
        mask = self._mask(attn_mask, key_padding_mask, len(q), q.dtype)
        dropout = self.dropout if self.training else 0.0
        if dropout or need_weights:
            drop = drop_heads(dropout, self.num_heads, self.part)
            mixed, weights = softmax_attention(
                q, k, v, mask, scale=self.head_dim**-0.5, drop=drop, safe=not need_weights
            )
        else:
            mixed = fused_attention(q, k, v, mask)
        # laid out in memory as torch's, (length, batch, features), since dropout masks follow the memory
        mixed = mixed.permute(2, 0, 1, 3)
        if self.gathers:
            mixed = gather(mixed, self.axis, self.counts, 2)
        out = self.out_proj(mixed.flatten(2))
        if not batched:
            out = out.squeeze(1)
        elif self.batch_first:
            out = out.transpose(0, 1)
        if not need_weights:
            return out, None
        if average_attn_weights:
            weights = leave(weights.sum(1), self.axis) / self.num_heads
        else:
            weights = gather(weights, self.axis, self.counts, 1)
        return out, weights if batched else weights.squeeze(0)

    def _project(self, *inputs):
        """Queries, keys and values of this rank's heads, whose features lie side by side. Those of one input are made
        together."""
        with local():
            if self._qkv_same_embed_dim:
                weights = self.in_proj_weight.chunk(3)
            else:
                weights = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
            biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
            made: dict[int, torch.Tensor] = {}
            for x in inputs:
                of_it = [n for n, other in enumerate(inputs) if other is x]
                if of_it[0] not in made:
                    made.update(zip(of_it, entering(x, [(weights[n], biases[n]) for n in of_it], self.axis)))
            return [made[n] for n in range(3)]

    def _mask(self, attn_mask, key_padding_mask, batch, dtype):
        """Both masks as numbers to add, for this rank's heads: (batch, heads or 1, length, length); or None."""
        attn_mask, key_padding_mask = (enter_learned(mask, self.axis) for mask in (attn_mask, key_padding_mask))
        if attn_mask is not None:
            attn_mask = _to_add(attn_mask, dtype)
            if attn_mask.dim() == 3:  # (batch × heads, length, length)
                attn_mask = attn_mask.unflatten(0, (batch, self.num_heads))[:, self.part]
        if key_padding_mask is not None:
            key_padding_mask = _to_add(key_padding_mask, dtype).view(batch, 1, 1, -1)
            attn_mask = key_padding_mask if attn_mask is None else attn_mask + key_padding_mask
        return attn_mask


def enter_learned(mask: torch.Tensor, axis: Axis):
    """Each rank's heads give a part of the gradient of a mask that is learned, as a position bias is."""
    return enter(mask, axis) if mask is not None and mask.requires_grad else mask


def _to_add(mask, dtype):
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, -math.inf)


def split_multihead_attention(plan: Plan, module: torch.nn.MultiheadAttention) -> None:
    for option, is_on in (("add_bias_kv", module.bias_k is not None), ("add_zero_attn", module.add_zero_attn)):
        if is_on:
            raise ValueError(f"{option} is not supported")
    out, kinds = module.out_proj, (torch.nn.Linear, torch.nn.modules.linear.NonDynamicallyQuantizableLinear)
    if why := altered(out) or ("" if type(out) in kinds else f"its type is {type(out).__name__}, not torch's own"):
        raise ValueError(f"out_proj: {why}")
    heads = plan.parts(module.num_heads)
    parts = [slice(part.start * module.head_dim, part.stop * module.head_dim) for part in heads]
    plan.split(module, "in_proj_weight", 0, parts, fused=3)
    plan.split(module, "in_proj_bias", 0, parts, fused=3)
    for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
        plan.split(module, name, 0, parts)
    if out not in plan.replicated:
        split_matrix(plan, out, SplitLinear, 0, 1, by_output=False, parts=parts, enters=False)
    plan.swap_class(
        module, SplitMultiheadAttention, axis=plan.axis, part=heads[plan.axis.rank],
        counts=tuple(p.stop - p.start for p in heads), gathers=out in plan.replicated,
    )  # fmt: skip


def split_feed_forward(plan: Plan, module: torch.nn.TransformerEncoderLayer | torch.nn.TransformerDecoderLayer) -> None:
    """linear1, activation, dropout, linear2 of nn.TransformerEncoderLayer and nn.TransformerDecoderLayer.

    Left to the layers themselves where one of them was exchanged.
    """
    linears = all(is_plain(child, torch.nn.Linear) for child in (module.linear1, module.linear2))
    if not (linears and is_plain(module.dropout, torch.nn.Dropout) and is_pointwise(module.activation)):
        return
    features, activation = module.linear1.out_features, module.activation
    between = (activation,) if isinstance(activation, torch.nn.Module) else ()
    calls = plan.unit_calls(module, "_ff_block")
    planned = [(module, name, getattr(module, name)) for name in ("linear1", "activation", "dropout", "linear2")]
    split_pair(plan, module.linear1, module.linear2, between, planned, calls, over_tokens=False)
    parts = plan.parts(features)
    if plan.box:
        parts = [part for (part,) in plan.blocks(Layout.of((features,), {0: ("x", "y", "z")}))]
    plan.swap_class(module.dropout, SplitDropout, features=features, part=parts[plan.axis.rank], unit_calls=calls)
