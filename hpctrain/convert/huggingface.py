"""Hugging Face's GPT-2: heads and hidden features divided.

Where a layer of a unit was exchanged, as for LoRA, the unit is left to its layers, each of which is divided by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from hpctrain.convert.box import Entered, split_block, split_down, split_up
from hpctrain.convert.plain import is_plain, is_pointwise, those_with
from hpctrain.convert.products import (
    SharedEntry,
    SplitConv1D,
    share_entry,
    split_conv1d,
    split_matrix,
)  # fmt: skip
from hpctrain.convert.split_heads import divide_heads, heads_on_box
from hpctrain.convert.unit_module import enclose

if TYPE_CHECKING:
    from hpctrain.convert.plan import Plan


class FusedHeads(SharedEntry, SplitConv1D):
    """Mixin for GPT-2's projection to queries, keys and values.

    Without heads, a rank goes on with one of zeros: Hugging Face's code cannot cut nothing in three. `HeadsBack`
    drops it.

    Attributes: `padding`, the features of that head's queries, keys and values; 0 where there are heads.
    """

    padding: int

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None, enters: bool):
        return F.pad(super().multiply(x, bias, enters), (0, self.padding))


class HeadsBack(SplitConv1D):
    """Mixin for GPT-2's projection of all heads back."""

    def multiply_leaving(self, x: torch.Tensor, bias: torch.Tensor | None, start: int, shards: bool):
        return super().multiply_leaving(x[..., : len(self.weight)], bias, start, shards)


def split_gpt2_attention(plan: Plan, module: Any) -> None:
    fused = {module.c_attn: 3}
    if module.is_cross_attention:
        fused = {module.c_attn: 2, module.q_attn: 1}
    plain = all(is_plain(projection, "Conv1D") for projection in (*fused, module.c_proj))
    if not (plain and is_plain(module.attn_dropout, nn.Dropout)):
        return
    heads, width = plan.parts(module.num_heads), module.head_dim
    if plan.box and module.num_heads >= plan.axis.size:
        heads, _ = heads_on_box(plan, module.num_heads, module.num_heads)
        entered = Entered(plan.grid, over_tokens=False)
        for projection, times in fused.items():
            split_up(plan, projection, entered, times, width)
        split_down(plan, module.c_proj, entered, width)
        divide_heads(plan, module, heads, heads, module.num_heads)
        part = heads[plan.axis.rank]
        enclose(plan, module, entered, [*fused, module.c_proj])
        plan.change(module, split_size=(part.stop - part.start) * width)
        return
    parts = [slice(part.start * width, part.stop * width) for part in heads]
    part = parts[plan.axis.rank]
    local = part.stop - part.start
    for projection, times in fused.items():
        split_matrix(plan, projection, FusedHeads, 1, 0, by_output=True, parts=parts, fused=times, leaves=False)
        plan.change(projection, padding=0 if local else times * width)
    split_matrix(plan, module.c_proj, HeadsBack, 1, 0, by_output=False, parts=parts, enters=False)
    share_entry(plan, module, [[projection] for projection in fused])
    keys = [part if part.stop > part.start else slice(0, 1) for part in heads]  # a head of zeros
    divide_heads(plan, module, heads, keys, module.num_heads)
    plan.change(module, split_size=local or width)


def split_gpt2_mlp(plan: Plan, module: Any) -> None:
    if not (is_plain(module.c_fc, "Conv1D") and is_plain(module.c_proj, "Conv1D") and is_pointwise(module.act)):
        return
    if plan.box:
        split_block(plan, module, [module.c_fc], module.c_proj)
    else:
        split_conv1d(plan, module.c_fc, by_output=True, leaves=False)
        for layer in (module.c_fc, module.c_proj):
            plan.change(layer, unit_calls=plan.unit_calls(module, "forward"))
        split_conv1d(plan, module.c_proj, by_output=False, enters=False)
    planned = [(module, name, getattr(module, name)) for name in ("c_fc", "act", "c_proj")]
    plan.change(module.c_fc, planned=those_with(module.c_proj, planned))
    plan.change(module.c_proj, between=(module.act,), planned=planned)
