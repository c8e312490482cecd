"""Llama: token embedding, blocks of rotary grouped-query attention and SwiGLU, RMS norms, no biases."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from hpctrain.grid import Grid
from hpctrain.layers import MLP, Attention, Dropout, RMSNorm, Tokens
from hpctrain.layers.parameter import Factory
from hpctrain.layers.rotary import RopeScaling
from hpctrain.models.llama.shape import LlamaShape
from hpctrain.models.staged import STD, StagedTransformer
from hpctrain.randomness import RngKey

if TYPE_CHECKING:
    from hpctrain.layers.algorithm import Algorithm


class Llama(StagedTransformer):
    """This rank's part of a Llama; arguments as of `StagedTransformer`, with a `LlamaShape`."""

    def extend_embedding(self):
        self.drop = Dropout(self.grid, self.shape.dropout, self.shape.width, key=self.key / "drop")

    def embed(self, ids: torch.Tensor, tokens: Tokens):
        return self.drop(super().embed(ids, tokens), tokens)

    def make_block(self, index: int):
        return Block(
            self.grid, self.shape, functools.partial(self.make_mlp, index), algorithm=self.algorithm,
            recompute=self.recompute, key=self.key / "blocks" / index, **self.factory,
        )  # fmt: skip

    def make_mlp(self, index: int, **options: Any) -> torch.nn.Module:
        """What block `index` has after its second norm, with options as of `layers.MLP`: a module of (x, tokens) -> x
        in the residual layout."""
        return MLP(self.grid, self.shape.width, self.shape.ffn, "swiglu", bias=False, **options)

    def make_norm(self):
        return RMSNorm(self.grid, self.shape.width, self.shape.norm_eps, key=self.key / "ln_f", **self.factory)


class Block(torch.nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), in the residual layout. `make_mlp` makes the latter's module."""

    def __init__(
        self, grid: Grid, shape: LlamaShape, make_mlp: Callable[..., torch.nn.Module], *, algorithm: str | Algorithm,
        recompute: str = "none", key: RngKey, dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):  # fmt: skip
        super().__init__()
        factory = Factory(dtype=dtype, device=device)
        products = {"std": STD, "std_out": STD / (2 * shape.layers) ** 0.5, "algorithm": algorithm, **factory}
        self.ln_1 = RMSNorm(grid, shape.width, shape.norm_eps, key=key / "ln_1", **factory)
        self.attention = Attention(
            grid, shape.width, shape.heads, shape.dropout, kv_heads=shape.kv_heads, head_width=shape.head_width,
            window=shape.window, rotary=shape.rope_base,
            rope_scaling=_rope_scaling(*shape.rope_scaling) if shape.rope_scaling else None,
            qk_norm=shape.qk_norm, norm_eps=shape.norm_eps, qkv_bias=shape.qkv_bias, proj_bias=False,
            recompute=recompute == "attention", key=key / "attention", **products,
        )  # fmt: skip
        self.ln_2 = RMSNorm(grid, shape.width, shape.norm_eps, key=key / "ln_2", **factory)
        self.mlp = make_mlp(key=key / "mlp", **products)
        self.drop_1 = Dropout(grid, shape.dropout, shape.width, key=key / "drop_1")
        self.drop_2 = Dropout(grid, shape.dropout, shape.width, key=key / "drop_2")

    def forward(self, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        x = x + self.drop_1(self.attention(self.ln_1(x, tokens), tokens), tokens)
        return x + self.drop_2(self.mlp(self.ln_2(x, tokens), tokens), tokens)


def _rope_scaling(factor: float, low: float, high: float, original_context: float) -> RopeScaling:
    return RopeScaling(factor, low, high, int(original_context))
