"""Attention and MLP of Hugging Face's models: heads and hidden features divided, their own code untouched.

Hugging Face writes -1 for the number of heads, or reads it from the module, so that its code works on however many the
projections give it. Caches then hold this rank's heads, and `generate` works.

Where a layer of a unit was exchanged, as for LoRA, the unit is left to its layers, each of which is divided by itself.
"""

from __future__ import annotations

import copy
import inspect
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map

from hpctrain.comm import functional
from hpctrain.convert.attention import drop_heads
from hpctrain.convert.boundary import enter, gather, leave
from hpctrain.convert.heads import HEADS, find_heads
from hpctrain.convert.plain import is_hooked, is_plain, is_pointwise
from hpctrain.convert.products import (
    SharedEntry,
    SplitConv1D,
    Unit,
    share_entry,
    split_conv1d,
    split_linear,
    split_matrix,
)  # fmt: skip
from hpctrain.convert.sequence import use_context_attention
from hpctrain.convert.sharding import local
from hpctrain.layers.softmax_attention import softmax_attention
from hpctrain.shard import split, split_sizes, subsplit

if TYPE_CHECKING:
    from hpctrain.convert.plan import Plan


class SplitAttention(Unit):
    """Mixin for an attention module.

    Attributes: `axis`; `heads`, of all ranks; `part`, the query heads of this rank; `counts`, query heads by rank;
    `arguments`, the names of the forward's.
    """

    def forward(self, *args: Any, **kwargs: Any):
        kwargs.update(zip(self.arguments, args))
        here, learned = self.counts[self.axis.rank], None
        for name, value in kwargs.items():
            if name.endswith("states"):  # to projections, which bring them inside
                continue
            if name.endswith("head_mask") and value is not None:
                raise ValueError(f"{self.path} of a parallelized model takes no {name}")
            per_head = name.endswith(("mask", "bias"))
            value = self._inside(name, value, per_head or name == "position_embeddings")
            if per_head and isinstance(value, torch.Tensor):
                if value.dim() == 4 and value.shape[1] == self.heads > 1:
                    value = value[:, self.part if here else slice(1)]  # GPT-2 goes on with a head of zeros
                learned = value if value.requires_grad else learned
            kwargs[name] = value
        out, weights = super().forward(**kwargs)
        if not here and learned is not None:
            out = out + learned[:0].sum()  # 0: torch's kernel leaves the mask of no heads out of the graph
        wanted = self._forward_hooks or kwargs.get("output_attentions")  # hooks: Hugging Face's, to collect them
        if weights is None or not wanted:
            return out, None
        return out, gather(weights[:, :here], self.axis, self.counts, 1)

    def _inside(self, name, value, known):
        """Each rank's heads give a part of the gradient of what is learned, as a position bias is."""

        def inside(x):
            if not isinstance(x, torch.Tensor) or not x.requires_grad:
                return x
            if not known:
                raise ValueError(
                    f"{self.path} of a parallelized model: nobody knows what the gradient of its {name} is"
                )
            return enter(x, self.axis)

        return tree_map(inside, value) if isinstance(value, (torch.Tensor, tuple, list)) else value


class HeadNorm:
    """Mixin for a norm of queries or keys, which treats every head by itself: whole weights, on this rank's heads.

    Attribute: `axis`.
    """

    def forward(self, *args: Any, **kwargs: Any):
        weights = dict(self._parameters)
        try:
            self._parameters.update(
                {name: enter(weight, self.axis) for name, weight in weights.items() if weight is not None}
            )
            return super().forward(*args, **kwargs)
        finally:
            self._parameters.update(weights)


class SplitExperts:
    """Mixin for the experts of a mixture, in two stacks of matrices: each rank has some hidden features of every one.

    Attribute: `axis`.
    """

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor):
        with local():
            x, weights = (enter(x, self.axis) for x in (hidden_states, top_k_weights))
            return leave(super().forward(x, top_k_index, weights), self.axis)


class FusedHeads(SharedEntry, SplitConv1D):
    """Mixin for GPT-2's projection to queries, keys and values.

    Without heads, a rank goes on with one of zeros: Hugging Face's code cannot cut nothing in three. `HeadsBack`
    drops it.

    Attributes: `padding`, the features of that head's queries, keys and values; 0 where there are heads.
    """

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None):
        return F.pad(super().multiply(x, bias), (0, self.padding))


class HeadsBack(SplitConv1D):
    """Mixin for GPT-2's projection of all heads back."""

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None):
        return super().multiply(x[..., : len(self.weight)], bias)


class SharedHead(SharedEntry):
    """Mixin for a projection to key or value heads that are fewer than the ranks, so that some ranks share one.

    The features are computed divided, gathered, and each rank goes on with those it needs.

    Attributes: `needed`, the features of this rank's head.
    """

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None):
        part = super().multiply(x, bias)
        whole = functional.all_gather(part.flatten(0, -2).t(), self.axis, self.counts).t()
        return whole[:, self.needed].unflatten(0, part.shape[:-1])


def split_gpt2_attention(plan: Plan, module: torch.nn.Module) -> None:
    fused = {module.c_attn: 3}
    if module.is_cross_attention:
        fused = {module.c_attn: 2, module.q_attn: 1}
    plain = all(is_plain(projection, "Conv1D") for projection in (*fused, module.c_proj))
    if not (plain and is_plain(module.attn_dropout, nn.Dropout)):
        return
    if _draws_for_heads(plan, module, module.attn_dropout.p):
        return
    heads, width = plan.parts(module.num_heads), module.head_dim
    parts = [slice(part.start * width, part.stop * width) for part in heads]
    part = parts[plan.axis.rank]
    local = part.stop - part.start
    for projection, times in fused.items():
        split_matrix(plan, projection, FusedHeads, 1, 0, by_output=True, parts=parts, fused=times, leaves=False)
        plan.change(projection, padding=0 if local else times * width)
    split_matrix(plan, module.c_proj, HeadsBack, 1, 0, by_output=False, parts=parts, enters=False)
    share_entry(plan, module, list(fused))
    _split_heads(plan, module, heads, module.attn_dropout.p)
    plan.change(module, split_size=local or width)


def split_gpt2_mlp(plan: Plan, module: torch.nn.Module) -> None:
    if not (is_plain(module.c_fc, "Conv1D") and is_plain(module.c_proj, "Conv1D") and is_pointwise(module.act)):
        return
    split_conv1d(plan, module.c_fc, by_output=True, leaves=False)
    split_conv1d(plan, module.c_proj, by_output=False, enters=False)


def split_attention(plan: Plan, module: torch.nn.Module) -> None:
    """Attention with its projection back; leaves alone what is none."""
    found = find_heads(module)
    if found is not None and found.out:
        _split_projections(plan, module, found, getattr(module, found.out))


def split_bert_attention(plan: Plan, module: torch.nn.Module) -> None:
    """Attention whose projection back is in `output`."""
    found, out = find_heads(module.self), module.output.dense
    if found is not None and not found.out and is_plain(out, nn.Linear):
        _split_projections(plan, module.self, found, out)


def _split_projections(plan, module, found, out):
    if _draws_for_heads(plan, module, found.dropout):
        return
    width, groups, ranks = found.width, found.groups, plan.axis.size
    heads = out.in_features // width
    queries, keys = zip(*(_grouped_heads(heads, heads // groups, ranks, rank) for rank in range(ranks)))
    if not (found.may_be_none or all(part.stop > part.start for part in queries)):
        return
    scaled = [[slice(part.start * width, part.stop * width) for part in parts] for parts in (queries, keys)]
    first, *rest = (getattr(module, name) for name in found.projections)
    shared = [projection.weight for projection in (first, *rest, out)]
    if any(plan.is_shared(weight) for weight in shared) or any(map(is_hooked, module.children())):
        return
    times = 1 if rest else 3
    parts = [slice(part.start * times, part.stop * times) for part in scaled[0]]
    split_matrix(plan, first, SharedEntry, 0, 1, by_output=True, parts=parts, leaves=False)
    for projection in rest:
        if heads // groups >= ranks:
            split_matrix(plan, projection, SharedEntry, 0, 1, by_output=True, parts=scaled[1], leaves=False)
        else:
            split_matrix(plan, projection, SharedHead, 0, 1, by_output=True, leaves=False)
            plan.change(projection, needed=scaled[1][plan.axis.rank])
    split_linear(plan, out, by_output=False, parts=scaled[0], enters=False)
    for name in found.norms:
        plan.whole(getattr(module, name))
        plan.swap_class(getattr(module, name), HeadNorm, axis=plan.axis)
    share_entry(plan, module, [first, *rest])
    _split_heads(plan, module, queries, found.dropout)
    part, kept = queries[plan.axis.rank], keys[plan.axis.rank]
    local = part.stop - part.start
    plan.change(module, **{name: local for name in HEADS if isinstance(getattr(module, name, None), int)})
    if hasattr(module, "num_key_value_groups"):
        plan.change(module, num_key_value_groups=local // max(1, kept.stop - kept.start))


def split_layer_feed_forward(plan: Plan, module: torch.nn.Module) -> None:
    """The pair of linear layers that a transformer layer has of its own, or in `intermediate` and `output`."""
    if hasattr(module, "fc1"):
        up, down, activation = module.fc1, module.fc2, module.activation_fn
    else:
        up, down, activation = module.intermediate.dense, module.output.dense, module.intermediate.intermediate_act_fn
    pair = all(is_plain(linear, nn.Linear) and not plan.is_shared(linear.weight) for linear in (up, down))
    if not pair or not is_pointwise(activation) or getattr(module, "activation_dropout", 0.0):
        return
    split_linear(plan, up, by_output=True, leaves=False)
    split_linear(plan, down, by_output=False, enters=False)


def split_experts(plan: Plan, module: torch.nn.Module) -> None:
    if set(module._parameters) != {"gate_up_proj", "down_proj"} or not is_pointwise(module.act_fn):
        raise ValueError("its experts are not those of a known transformers")
    plan.split(module, "gate_up_proj", 1, fused=2)
    plan.split(module, "down_proj", 2)
    plan.swap_class(module, SplitExperts, axis=plan.axis)


def _grouped_heads(heads: int, key_heads: int, ranks: int, rank: int) -> tuple[slice, slice]:
    """The query heads of a rank, and the key heads that they attend with.

    Whole groups of query heads where there are enough key heads; otherwise several ranks share one key head and divide
    its group.

    >>> [_grouped_heads(8, 2, 4, rank)[0] for rank in range(4)]
    [slice(0, 2, None), slice(2, 4, None), slice(4, 6, None), slice(6, 8, None)]
    >>> _grouped_heads(8, 2, 4, 3)[1]
    slice(1, 2, None)
    """
    group = heads // key_heads
    if key_heads >= ranks:
        keys = split(key_heads, ranks, rank)
        return slice(keys.start * group, keys.stop * group), keys
    sharing = split_sizes(ranks, key_heads)
    first = 0
    for key, count in enumerate(sharing):
        if rank < first + count:
            queries = subsplit(slice(key * group, (key + 1) * group), count, rank - first)
            # no query heads, no key heads
            return queries, slice(key, key + (queries.stop > queries.start))
        first += count
    raise AssertionError(f"rank {rank} of {ranks}")


def _draws_for_heads(plan, module, dropout: float) -> bool:
    """Whether dropout draws for the heads that it is given: of "sdpa" there is one that does not (`_attend`), of others
    not, and the module is given all heads."""
    return dropout > 0 and module.config._attn_implementation != "sdpa" and plan.sequence.size == 1


def _split_heads(plan, module, parts, dropout: float) -> None:
    counts = tuple(part.stop - part.start for part in parts)
    plan.swap_class(
        module, SplitAttention, axis=plan.axis, heads=sum(counts), part=parts[plan.axis.rank], counts=counts,
        arguments=list(inspect.signature(type(module).forward).parameters)[1:],
    )  # fmt: skip
    if plan.sequence.size > 1:
        plan.context_attention.add(module)
        use_context_attention(plan, module)
        return
    if dropout == 0:
        return
    from transformers import AttentionInterface

    AttentionInterface.register("hpctrain", _attend)
    config = copy.copy(module.config)
    config._attn_implementation_internal = "hpctrain"
    plan.change(module, config=config)


def _attend(module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, **kwargs):
    """Attention as Hugging Face's "sdpa", with the dropout masks that one rank would draw."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if not dropout:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, is_causal=is_causal, **kwargs
        )
    length, keys = query.shape[2], key.shape[2]
    if attention_mask is None and length > 1 and (module.is_causal if is_causal is None else is_causal):
        attention_mask = torch.ones(length, keys, dtype=torch.bool, device=query.device).tril()
    mixed, _ = softmax_attention(
        query, key, value, attention_mask, scale=scaling, drop=drop_heads(dropout, module.heads, module.part)
    )
    return mixed.transpose(1, 2).contiguous(), None
