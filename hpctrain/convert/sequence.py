"""Sequences cut over the ring and Ulysses axes, in Hugging Face's GPT-2 and Llama.

The model takes whole sequences, the same on all ranks that share them, and cuts them at its entrance: each rank goes on
with its tokens, at their positions. Attention alone looks at others. What leaves the model is whole again, so that the
code around it is that of one rank; every rank holds the same whole gradient of it, as on a tensor axis.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from hpctrain import comm
from hpctrain.convert.boundary import gather, leave, take
from hpctrain.convert.plain import altered, is_one_of, is_plain, is_pointwise
from hpctrain.convert.pretrained import DividedPretrained
from hpctrain.convert.sequence_dropout import (
    OF_ATTENTION,
    OF_TOKENS,
    CurrentSpans,
    drawn_mask,
    members,
    positions,
)
from hpctrain.convert.sharded_activation import whole
from hpctrain.grid import Grid
from hpctrain.layers.context.attention import Context, attend
from hpctrain.layers.context.mask import Mask
from hpctrain.layers.context.spans import Spans, sequence_spans, span_length

if TYPE_CHECKING:
    from hpctrain.convert.plan import Plan

ATTENTION = ("GPT2Attention", "LlamaAttention")
CUT = ("GPT2LMHeadModel", "GPT2Model", "LlamaForCausalLM", "LlamaModel")  # their entrance is known
# Of these, and of pointwise activations, it is known that they treat every position by itself.
POSITIONWISE = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.ModuleList, nn.Dropout)
OF_HUGGING_FACE = (
    *CUT, *ATTENTION, "GPT2Block", "GPT2MLP", "Conv1D", "LlamaDecoderLayer", "LlamaMLP", "LlamaRMSNorm",
    "LlamaRotaryEmbedding",
)  # fmt: skip
IGNORED = -100  # a label that is no target
NAMED = 3  # modules in an error, for each reason
_REMEDY = "Use a grid with grid.data = N, or ht.layers.context_attention in a model of your own"


class CutSequences(DividedPretrained):
    """Mixin for a model of CUT.

    Attributes: `hpctrain_grid`; `hpctrain_current`, which its dropout looks at.
    """

    path: str
    hpctrain_current: CurrentSpans

    def forward(
        self, input_ids: torch.Tensor | None = None, *, attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None, inputs_embeds: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None, labels: torch.Tensor | None = None,
        num_items_in_batch: int | torch.Tensor | None = None, use_cache: bool | None = None, **options: Any,
    ):  # fmt: skip
        """As of the type, of whole sequences; with `labels`, the loss alone.

        Raises:
            ValueError: for sequences shorter than the ranks, padding, caches, and outputs of which each rank has a
                part.
        """
        grid, given = self.hpctrain_grid, input_ids if inputs_embeds is None else inputs_embeds
        if given is None:
            raise ValueError(f"{type(self).__name__} needs input_ids or inputs_embeds")
        self._check(attention_mask, labels, {"use_cache": use_cache, **options})
        batch, length = given.shape[:2]
        sharding = SequenceSharding(grid, tuple(sequence_spans(length, grid.ring.size, grid.ulysses.size)))
        if not all(sharding.spans):
            raise ValueError(
                f"{self.path}: sequences of {length} tokens leave some of the {grid.sequence.size} ranks that share "
                f"them without any; use a grid of fewer, or sequences of at least {2 * grid.sequence.size} tokens"
            )
        masks = (Mask(),) * batch
        if position_ids is None:
            position_ids = torch.arange(length, device=given.device).unsqueeze(0)
        elif attention_mask is None and not self._would_cache(use_cache):
            masks = documents(position_ids.expand(batch, -1))
        self.hpctrain_current.spans = sharding.spans
        parts = {"input_ids": input_ids, "inputs_embeds": inputs_embeds, "token_type_ids": token_type_ids}
        out = super().forward(
            **{name: sharding.enter(whole) for name, whole in parts.items() if whole is not None},
            position_ids=sharding.enter(position_ids), use_cache=False, return_dict=True,
            hpctrain_context=Context(grid.ring, grid.ulysses, sharding.spans, masks, 1.0),
        )  # fmt: skip
        if "logits" not in out:
            return type(out)(last_hidden_state=sharding.leave(out.last_hidden_state))
        if labels is None:
            return type(out)(logits=sharding.leave(out.logits))
        targets = F.pad(labels, (0, 1), value=IGNORED)[:, 1:].to(out.logits.device)
        logits = out.logits.to(comm.accumulation_dtype(out.logits.dtype)).flatten(0, 1)
        loss = F.cross_entropy(logits, sharding.enter(targets).flatten(), ignore_index=IGNORED, reduction="sum")
        items = (targets != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
        return type(out)(loss=leave(loss / items, grid.sequence))

    def _would_cache(self, use_cache):
        """Whether Hugging Face would make a cache, and then takes positions that begin anew for one document's."""
        if use_cache is not None:
            return use_cache
        return self.config.use_cache and not (self.base_model.gradient_checkpointing and self.training)

    def generate(self, *arguments: Any, **options: Any):
        raise ValueError(
            f"{self.path}: generate keeps keys and values of whole sequences, which {self.hpctrain_grid.sequence.size} "
            "ranks share; load ht.gather_state_dict(model) into a model on a grid with grid.data = N"
        )

    def _check(self, attention_mask, labels, options):
        kind = type(self).__name__
        for name, value in options.items():
            if value is not None and value is not (name == "return_dict"):
                raise ValueError(
                    f"{kind} got {name}, of which a rank that shares sequences would have a part; leave it out, or use "
                    "a grid with grid.data = N"
                )
        if attention_mask is not None and not bool((attention_mask == 1).all()):
            raise ValueError(
                f"{kind} got an attention_mask that is not all ones: padding is not known of sequences that ranks "
                "share; pack documents one after the other, with position_ids that begin anew, or use grid.data = N"
            )
        if labels is not None and self.loss_function.__name__ != "ForCausalLMLoss":
            raise ValueError(
                f"{kind} has a loss_function of its own, which would see the tokens of one rank; compute the loss from "
                "the logits, which are whole where no labels are given"
            )


@dataclasses.dataclass(frozen=True)
class SequenceSharding:
    """Which tokens of whole sequences, (batch, length, …), each of the ranks that share them has: `spans` by rank."""

    grid: Grid
    spans: tuple[Spans, ...]

    def enter(self, whole: torch.Tensor) -> torch.Tensor:
        """Those of this rank. Adjoint: `leave`."""
        return take(whole[:, self._order.to(whole.device)], self.grid.sequence, self._counts, 1)

    def leave(self, part: torch.Tensor) -> torch.Tensor:
        """The whole, on every rank. Adjoint: `enter`."""
        return gather(whole(part), self.grid.sequence, self._counts, 1)[:, self._order.argsort().to(part.device)]

    @property
    def _counts(self):
        return tuple(map(span_length, self.spans))

    @property
    def _order(self):
        return torch.cat([positions(spans) for spans in self.spans])


def documents(position_ids: torch.Tensor) -> tuple[Mask, ...]:
    """Of each sequence, as Hugging Face reads positions: where they do not go on by one, another document begins.

    >>> documents(torch.tensor([[0, 1, 2, 0, 1], [3, 4, 5, 6, 7]]))
    (Mask(causal=True, window=0, documents=(3, 2)), Mask(causal=True, window=0, documents=()))
    """
    masks = []
    for row in position_ids:
        starts = [0, *((row.diff() != 1).nonzero().flatten() + 1).tolist(), len(row)]
        masks.append(Mask(documents=tuple(b - a for a, b in zip(starts, starts[1:])) if len(starts) > 2 else ()))
    return tuple(masks)


def use_context_attention(plan: Plan, module: Any) -> None:
    """Let an attention of ATTENTION, of which a rank has whole heads, look at the tokens of all ranks."""
    from transformers import AttentionInterface

    AttentionInterface.register("hpctrain-sequence", _attend)
    config = copy.copy(module.config)  # its own: set_attn_implementation of the model must not undo it
    config._attn_implementation_internal = "hpctrain-sequence"
    plan.change(module, config=config)


def _attend(
    module, query, key, value, attention_mask, dropout=0.0, scaling=None, hpctrain_context: Context | None = None, **_
):
    if hpctrain_context is None:
        raise ValueError(
            f"{module.path} got tokens of which nobody knows the positions: its ranks share sequences, which the model "
            "cuts when it is called as a whole; call that"
        )
    if hasattr(module, "current"):  # a block that is computed once more, after others were
        module.current.spans = hpctrain_context.spans
    masks = drawn_mask(query, dropout, hpctrain_context, module.all_heads, module.part) if dropout else None
    context = dataclasses.replace(hpctrain_context, scale=scaling, dropout=masks)
    return attend(query, key, value, context).transpose(1, 2).contiguous(), None


def check_sequence(model: nn.Module, attention: set[nn.Module]) -> None:
    """Raise ValueError, naming every offender, unless the tokens of a sequence meet in attention alone, and there as
    `use_context_attention` has it, of the modules `attention`."""
    if not is_one_of(model, CUT):
        raise ValueError(
            f"parallelize cannot cut sequences for a {type(model).__name__}, whose entrance it does not know; it knows "
            f"{', '.join(CUT)}. {_REMEDY}"
        )
    refused: dict[str, list[str]] = {}
    drops = members(model, OF_TOKENS) | members(model, OF_ATTENTION)
    for path, module in model.named_modules():
        if why := _refusal(module, attention, drops):
            refused.setdefault(why, []).append(f"{path or 'the model itself'} ({type(module).__name__})")
    if refused:
        reasons = (
            ", ".join(names[:NAMED]) + f" and {len(names) - NAMED} more" * (len(names) > NAMED) + f": {why}"
            for why, names in refused.items()
        )
        raise ValueError(f"parallelize cannot cut sequences for {'; '.join(reasons)}. {_REMEDY}")


def _refusal(module, attention, drops) -> str:
    if is_one_of(module, ATTENTION) and module not in attention:
        return "its projections were exchanged or are replicated; leave them as Hugging Face made them"
    config = getattr(module, "config", None)
    if is_one_of(module, CUT) and not getattr(config, "is_causal", True):
        return "is_causal = False is not supported"
    if is_plain(module, "GPT2Block") and hasattr(module, "crossattention"):
        return "cross attention, of sequences that are not cut, is not supported"
    if is_plain(module, "LlamaRotaryEmbedding") and ("dynamic" in module.rope_type or module.rope_type == "longrope"):
        return f"rope_type = {module.rope_type} depends on the tokens that a rank has"
    if isinstance(module, nn.Dropout) and module.p and module not in drops:
        return f"dropout of {module.p} would draw masks of the tokens that a rank has; set it to 0"
    if why := altered(module):
        return why
    known = type(module) in POSITIONWISE or is_one_of(module, OF_HUGGING_FACE) or is_pointwise(module)
    return "" if known else "nobody knows whether it mixes positions"
