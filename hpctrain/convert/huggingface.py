"""Attention and MLP of Hugging Face's GPT-2 and Llama: heads and hidden features divided, their own code untouched.

Hugging Face writes -1 for the number of heads, so that its code works on however many the projections give it.
Caches then hold this rank's heads, and `generate` works.

Where a layer of a unit was exchanged, as for LoRA, the unit is left to its layers, each of which is divided by itself.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from hpctrain.comm import functional
from hpctrain.convert.attention import drop_heads, enter_learned
from hpctrain.convert.boundary import enter, gather
from hpctrain.convert.plain import is_plain, is_pointwise
from hpctrain.convert.products import SplitConv1D, SplitLinear, split_conv1d, split_linear, split_matrix
from hpctrain.convert.sequence import use_context_attention
from hpctrain.layers.softmax_attention import softmax_attention
from hpctrain.shard import split, split_sizes, subsplit

if TYPE_CHECKING:
    from hpctrain.convert.plan import Plan


class Entered:
    """Mixin for a unit of which several layers take the input: it is brought inside once."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any):
        return super().forward(enter(hidden_states, self.axis), *args, **kwargs)


class SplitAttention(Entered):
    """Mixin for GPT2Attention and LlamaAttention.

    Attributes: `axis`; `heads`, of all ranks; `part`, the query heads of this rank; `counts`, query heads by rank.
    """

    def forward(
        self,
        hidden_states: torch.Tensor,
        *args: Any,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        **kwargs: Any,
    ):
        mask = attention_mask = enter_learned(attention_mask, self.axis)
        local = self.counts[self.axis.rank]
        if attention_mask is not None and attention_mask.dim() == 4 and attention_mask.shape[1] == self.heads > 1:
            attention_mask = attention_mask[:, self.part if local else slice(1)]  # GPT-2 goes on with a head of zeros
        if encoder_hidden_states is not None:
            kwargs["encoder_hidden_states"] = enter(encoder_hidden_states, self.axis)
        out, weights = super().forward(hidden_states, *args, attention_mask=attention_mask, **kwargs)
        if not local and mask is not None and mask.requires_grad:
            out = out + mask[:0].sum()  # 0: torch's kernel leaves the mask of no heads out of the graph
        if weights is None or not self._forward_hooks:  # through hooks, Hugging Face collects `output_attentions`
            return out, None
        return out, gather(weights[:, :local], self.axis, self.counts, 1)


class FusedHeads(SplitConv1D):
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


class SharedHead(SplitLinear):
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
    heads, width = plan.parts(module.num_heads), module.head_dim
    parts = [slice(part.start * width, part.stop * width) for part in heads]
    part = parts[plan.axis.rank]
    local = part.stop - part.start
    for projection, times in fused.items():
        split_matrix(
            plan, projection, FusedHeads, 1, 0, by_output=True, parts=parts, fused=times, enters=False, leaves=False
        )
        plan.change(projection, padding=0 if local else times * width)
    split_matrix(plan, module.c_proj, HeadsBack, 1, 0, by_output=False, parts=parts, enters=False)
    _split_heads(plan, module, heads, module.attn_dropout.p)
    plan.change(module, split_size=local or width)


def split_gpt2_mlp(plan: Plan, module: torch.nn.Module) -> None:
    if not (is_plain(module.c_fc, "Conv1D") and is_plain(module.c_proj, "Conv1D") and is_pointwise(module.act)):
        return
    split_conv1d(plan, module.c_fc, by_output=True, leaves=False)
    split_conv1d(plan, module.c_proj, by_output=False, enters=False)


def split_llama_attention(plan: Plan, module: torch.nn.Module) -> None:
    if not all(is_plain(child, nn.Linear) for child in (module.q_proj, module.k_proj, module.v_proj, module.o_proj)):
        return
    width, groups = module.head_dim, module.num_key_value_groups
    heads = module.q_proj.out_features // width
    queries, keys = zip(*(_grouped_heads(heads, heads // groups, plan.axis.size, r) for r in range(plan.axis.size)))
    scaled = [[slice(part.start * width, part.stop * width) for part in parts] for parts in (queries, keys)]
    split_linear(plan, module.q_proj, by_output=True, parts=scaled[0], enters=False, leaves=False)
    for projection in (module.k_proj, module.v_proj):
        if heads // groups >= plan.axis.size:
            split_linear(plan, projection, by_output=True, parts=scaled[1], enters=False, leaves=False)
        else:
            split_matrix(plan, projection, SharedHead, 0, 1, by_output=True, enters=False, leaves=False)
            plan.change(projection, needed=scaled[1][plan.axis.rank])
    split_linear(plan, module.o_proj, by_output=False, parts=scaled[0], enters=False)
    part, kept = queries[plan.axis.rank], keys[plan.axis.rank]
    _split_heads(plan, module, queries, module.attention_dropout)
    plan.change(module, num_key_value_groups=(part.stop - part.start) // max(1, kept.stop - kept.start))


def split_llama_mlp(plan: Plan, module: torch.nn.Module) -> None:
    linears = module.gate_proj, module.up_proj, module.down_proj
    if not (all(is_plain(linear, nn.Linear) for linear in linears) and is_pointwise(module.act_fn)):
        return
    for up in (module.gate_proj, module.up_proj):
        split_linear(plan, up, by_output=True, enters=False, leaves=False)
    split_linear(plan, module.down_proj, by_output=False, enters=False)
    plan.swap_class(module, Entered, axis=plan.axis)


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


def _split_heads(plan, module, parts, dropout: float) -> None:
    counts = tuple(part.stop - part.start for part in parts)
    plan.swap_class(
        module, SplitAttention, axis=plan.axis, heads=sum(counts), part=parts[plan.axis.rank], counts=counts
    )
    if plan.sequence.size > 1:
        plan.context_attention.add(module)
        use_context_attention(plan, module)
        return
    if dropout == 0:
        return
    # Hugging Face's functions draw masks for the heads they are given, which would depend on the grid.
    implementation = module.config._attn_implementation
    if implementation != "sdpa":
        raise ValueError(f'attention dropout with attn_implementation={implementation!r}; set it to "sdpa"')
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
