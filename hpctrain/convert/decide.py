"""What divides each module of a model: by its type, by what it computes, or nothing, which leaves it whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from hpctrain.convert import (
    attention,
    chains,
    encoder,
    feed_forward,
    gathered_weights,
    huggingface,
    intermediate,
    norms,
    own_pairs,
    products,
    recurrent,
    rms_norm,
    split_heads,
    tables,
)
from hpctrain.convert.experts import split_experts
from hpctrain.convert.initial import check_buffers
from hpctrain.convert.plain import altered, is_of_huggingface, works_as
from hpctrain.convert.plan import Plan, Refused
from hpctrain.convert.rules import split_by_rule
from hpctrain.convert.tanh_gelu import fuse_tanh_gelu

# What divides a module of this type, or of an heir that works as it. Those of Hugging Face go by name, as transformers
# need not be there.
_OWNERS: dict[type | str, Callable[[Plan, Any], None]] = {
    nn.Linear: products.split_linear,
    "Conv1D": products.split_conv1d,
    "FalconLinear": products.split_linear,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), products.split_convolution),
    **dict.fromkeys(
        (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), products.split_transposed_convolution
    ),
    nn.Bilinear: products.split_bilinear,
    **dict.fromkeys((nn.LSTM, nn.GRU, nn.RNN), recurrent.split_recurrent),
    **dict.fromkeys((nn.LSTMCell, nn.GRUCell, nn.RNNCell, ParametrizationList), gathered_weights.split_gathered),
    nn.Embedding: tables.split_embedding,
    nn.EmbeddingBag: tables.split_embedding_bag,
    **dict.fromkeys((nn.LayerNorm, nn.GroupNorm, nn.PReLU), norms.split_norm),
    **dict.fromkeys((nn.RMSNorm, "LlamaRMSNorm"), rms_norm.split_rms_norm),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), norms.keep_batch_norm),
    nn.MultiheadAttention: attention.split_multihead_attention,
    "LlamaRotaryEmbedding": lambda plan, module: None,  # constant buffers
}
# Modules whose children are divided together.
_UNITS: dict[type | str, Callable[[Plan, Any], None]] = {
    nn.Sequential: chains.split_chain,
    **dict.fromkeys((nn.TransformerEncoderLayer, nn.TransformerDecoderLayer), attention.split_feed_forward),
    "GPT2Attention": huggingface.split_gpt2_attention,
    "GPT2MLP": huggingface.split_gpt2_mlp,
}
# The same of those that have such children.
_UNITS_BY_CHILDREN: dict[tuple[str, str], Callable[[Plan, Any], None]] = {
    ("intermediate", "output"): intermediate.split_intermediate,
    ("self", "output"): split_heads.split_bert_attention,
}
# Those of them that are divided together, where that is not all that is in the module. Of chains it is each pair.
_PARTS: dict[Any, Callable[[Any], Iterable[nn.Module]]] = {
    chains.split_chain: lambda module: (),
    attention.split_feed_forward: lambda module: (module.linear1, module.dropout, module.linear2),
    split_heads.split_bert_attention: lambda module: (*module.self.modules(), *_dense(module.output)),
    intermediate.split_intermediate: lambda module: (*module.intermediate.modules(), *_dense(module.output)),
}
# Modules whose weight is divided even where their forward is another around that of the type.
_ROOTS = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def decide(model: nn.Module, plan: Plan, trunk: nn.Module | None) -> None:
    """Tells `plan` how every module of the model is divided, or that it stays whole.

    Args:
        trunk: the blocks that a pipeline axis cuts into stages, which are no unit.

    Raises:
        ValueError: names every module that can be neither divided nor left whole.
    """
    replicated = plan.replicated
    refused, to_replicate, unknown = [], False, []
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"{path or 'the model itself'} ({type(module).__name__}) was compiled by torch.jit, and cannot be "
                "changed; parallelize the module that it was made of"
            )
        plan.close_unit()
        try:
            check_buffers(module)
            owner = None if altered(module) else _found(_OWNERS, module)
            if owner is None or module in replicated:
                norms.check_statistics(plan, module)
            if module in replicated:
                plan.whole(module)
                norms.unite_statistics(plan, module)
            elif not altered(module) and module is not trunk:
                _unit(plan, module)
                plan.close_unit()
            if isinstance(module, nn.TransformerEncoderLayer):
                plan.change(module, activation_relu_or_gelu=0)  # keeps torch from its fused kernel, for whole weights
            if isinstance(module, nn.TransformerEncoder):
                encoder.pad_encoder(plan, module)
            if module in plan.claimed:
                continue
            if not _owns(module):
                fuse_tanh_gelu(plan, module)
                continue
            if owner is None and (root := _root(module)):
                plan.roots[module] = root
                _OWNERS[root](plan, module)
            if owner is None:
                unknown.append((path, module))
            else:
                owner(plan, module)
        except ValueError as error:
            to_replicate |= not isinstance(error, Refused)
            refused.append(_named(path, module, error))
    plan.close_unit()
    for path, module in unknown:
        try:
            if not (rms_norm.keep_rms_norm(plan, module) or (plan.shards and norms.keep_by_rows(plan, module))):
                plan.keep(module)
        except ValueError as error:
            refused.append(_named(path, module, error))
    if refused:
        raise ValueError(
            f"parallelize cannot divide {'; '.join(refused)}."
            + " List paths or types in replicate=[...] to leave them whole on every rank" * to_replicate
        )


def _unit(plan, module):
    """Divides its layers together, where none of them is to stay whole."""
    divides = plan.replicated.isdisjoint(module.modules())
    if divides and split_by_rule(plan, module):
        return
    if unit := _found(_UNITS, module) or _by_children(module):
        if divides or (unit in _PARTS and plan.replicated.isdisjoint(_PARTS[unit](module))):
            unit(plan, module)
    elif divides and module not in plan.claimed and not split_experts(plan, module):
        split_heads.split_attention(plan, module)
        feed_forward.split_feed_forward_block(plan, module)
    own_pairs.split_own_pairs(plan, module)


def _root(module) -> type | None:
    """The type that the module's forward goes around, where that may be divided beneath it."""
    if module._parameters.get("weight") is None or altered(module):
        return None
    return next((root for root in _ROOTS if works_as(type(module), root, own="forward")), None)


def _named(path, module, error):
    return f"{path or 'the model itself'} ({type(module).__name__}): {error}"


def _found(table, module):
    """The entry of a table for the module's type; of Hugging Face's, by name."""
    kind = type(module)
    for base in kind.__mro__:
        if base in table and works_as(kind, base):
            return table[base]
    return table.get(kind.__name__) if is_of_huggingface(module) else None


def _by_children(module):
    children = {name for name, child in module._modules.items() if child is not None}
    return next((unit for names, unit in _UNITS_BY_CHILDREN.items() if children.issuperset(names)), None)


def _dense(module):
    return [child for name, child in module.named_children() if name == "dense"]


def _owns(module) -> bool:
    return any(value is not None for value in (*module._parameters.values(), *module._buffers.values()))
