"""Llama as the rest of hpctrain sees it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from hpctrain.grid import Grid
from hpctrain.models.costs import LinearCosts, MixtureCosts, TransformerCosts
from hpctrain.models.llama.shape import LlamaShape
from hpctrain.models.spec import ModelSpec

Shape = TypeVar("Shape", bound=LlamaShape)


class LlamaSpec(ModelSpec, Generic[Shape]):
    kind = "llama"
    keys = frozenset({
        "dropout", "kv_heads", "ffn", "head_width", "rope_base", "rope_scaling", "window", "norm_eps", "qkv_bias",
        "qk_norm",
    })  # fmt: skip

    def make_shape(self, options: Mapping[str, Any]) -> LlamaShape:
        width, heads = options["width"], options["heads"]
        kv_heads = options["kv_heads"] or heads
        if heads % kv_heads:
            raise ValueError(f"model.kv_heads must be a divisor of model.heads = {heads}, got {kv_heads}")
        if not options["head_width"] and width % heads:
            raise ValueError(
                f"model.width must be a multiple of model.heads = {heads} where model.head_width is not given, got"
                f" {width}"
            )
        head_width = options["head_width"] or width // heads
        if head_width % 2:
            raise ValueError(
                "the rotary position embedding needs heads of an even width, got model.head_width (by default"
                f" model.width / model.heads) = {head_width}"
            )
        if options["qkv_bias"] and options["qk_norm"]:
            raise ValueError(
                "model.qkv_bias (as of Qwen2) and model.qk_norm (as of Qwen3) are of no one model that could be"
                " exported; leave one out"
            )
        return LlamaShape(
            layers=options["layers"], width=width, heads=heads, context=options["context"],
            vocabulary=options["vocabulary"], kv_heads=kv_heads, ffn=options["ffn"] or default_ffn(width),
            head_width=head_width, rope_base=options["rope_base"] or 10000.0,
            rope_scaling=tuple(options["rope_scaling"]), window=options["window"], norm_eps=options["norm_eps"] or 1e-5,
            qkv_bias=options["qkv_bias"], qk_norm=options["qk_norm"], dropout=options["dropout"], tied=options["tied"],
        )  # fmt: skip

    def build(
        self,
        grid: Grid,
        shape: Shape,
        layers_per_stage: Sequence[int] | None = None,
        placement: Mapping[tuple[int, int], int] | None = None,
        **options: Any,
    ):
        from hpctrain.models.llama.model import Llama

        return Llama(grid, shape, layers_per_stage, placement, **options)

    def costs(self, shape: Shape) -> TransformerCosts:
        return block_costs(shape, swiglu_costs(shape.width, shape.ffn))

    @property
    def huggingface(self):
        from hpctrain.models.llama.huggingface import LlamaFormat

        return LlamaFormat()

    def describe(self, shape: Shape) -> str:
        window = f", window {shape.window}" if shape.window else ""
        return (
            f"{self.kind}: {shape.layers} layers, width {shape.width}, {shape.heads} heads of {shape.head_width}, "
            f"{shape.kv_heads} of keys, ffn {shape.ffn}, context {shape.context}{window}, "
            f"vocabulary {shape.vocabulary}"
        )


def block_costs(shape: LlamaShape, mlp: tuple[LinearCosts, ...], mixture: MixtureCosts | None = None):
    """`TransformerCosts` of blocks of attention and, after it, these products or a mixture."""
    width, mixed = shape.width, shape.heads * shape.head_width
    attention = (
        LinearCosts(width, mixed + 2 * shape.kv_heads * shape.head_width, to_inner=True, bias=shape.qkv_bias),
        LinearCosts(mixed, width, to_inner=False, bias=False),
    )
    return TransformerCosts(
        shape.layers, width, shape.context, shape.vocabulary, attention + mlp, shape.heads, shape.kv_heads,
        attention_width=mixed, rms_norm=True, head_norm_elements=2 * shape.head_width if shape.qk_norm else 0,
        tied=shape.tied, window=shape.window, mixture=mixture,
    )  # fmt: skip


def swiglu_costs(width: int, ffn: int) -> tuple[LinearCosts, ...]:
    """Of an MLP of this inner width, whose gate and up are one product."""
    return (
        LinearCosts(width, 2 * ffn, to_inner=True, bias=False),
        LinearCosts(ffn, width, to_inner=False, bias=False),
    )


def default_ffn(width: int) -> int:
    """As many weights as an MLP of two matrices and the inner width 4 × width has, in a multiple of 8.

    >>> default_ffn(128)
    344
    """
    return 8 * math.ceil(width / 3)
