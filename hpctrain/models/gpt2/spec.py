"""GPT-2 as the rest of hpctrain sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpctrain.grid import Grid
from hpctrain.models.costs import LinearCosts, TransformerCosts
from hpctrain.models.gpt2.shape import GPT2Shape
from hpctrain.models.spec import ModelSpec


class GPT2Spec(ModelSpec):
    kind = "gpt2"
    keys = frozenset({"dropout"})

    def make_shape(self, options: Mapping[str, Any]) -> GPT2Shape:
        width, heads = options["width"], options["heads"]
        if width % heads:
            raise ValueError(f"model.width must be a multiple of model.heads = {heads}, got {width}")
        return GPT2Shape(
            options["layers"], width, heads, options["context"], options["vocabulary"], options["dropout"],
            options["tied"],
        )  # fmt: skip

    def build(
        self,
        grid: Grid,
        shape: GPT2Shape,
        layers_per_stage: Sequence[int] | None = None,
        placement: Mapping[tuple[int, int], int] | None = None,
        **options: Any,
    ):
        from hpctrain.models.gpt2.model import GPT2

        return GPT2(grid, shape, layers_per_stage, placement, **options)

    def costs(self, shape: GPT2Shape) -> TransformerCosts:
        width = shape.width
        linears = (
            LinearCosts(width, 3 * width, to_inner=True, bias=True),
            LinearCosts(width, width, to_inner=False, bias=True),
            LinearCosts(width, 4 * width, to_inner=True, bias=True),
            LinearCosts(4 * width, width, to_inner=False, bias=True),
        )
        return TransformerCosts(
            shape.layers, width, shape.context, shape.vocabulary, linears, shape.heads, shape.heads,
            attention_width=width, positions=shape.context, tied=shape.tied,
        )  # fmt: skip

    @property
    def huggingface(self):
        from hpctrain.models.gpt2.huggingface import GPT2Format

        return GPT2Format()

    def describe(self, shape: GPT2Shape) -> str:
        return (
            f"{self.kind}: {shape.layers} layers, width {shape.width}, {shape.heads} heads, context {shape.context}, "
            f"vocabulary {shape.vocabulary}"
        )
