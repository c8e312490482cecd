"""GPT-2: token and position embeddings, blocks of attention and MLP, layer norm, projection onto the vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hpctrain.grid import Grid
from hpctrain.layers import MLP, Attention, Dropout, Embedding, LayerNorm, Tokens
from hpctrain.layers.embedding import scatter_rows
from hpctrain.layers.parameter import Factory
from hpctrain.models.gpt2.shape import GPT2Shape
from hpctrain.models.staged import STD, StagedTransformer
from hpctrain.randomness import RngKey

if TYPE_CHECKING:
    from hpctrain.layers.algorithm import Algorithm


class GPT2(StagedTransformer):
    """This rank's part of a GPT-2; arguments as of `StagedTransformer`, with a `GPT2Shape`."""

    def extend_embedding(self):
        grid, shape, key = self.grid, self.shape, self.key
        self.wpe = Embedding(grid, shape.context, shape.width, std=STD, key=key / "wpe", **self.factory)
        self.drop = Dropout(grid, shape.dropout, shape.width, key=key / "drop")

    def embedding_modules(self):
        return [self.wte, self.wpe]

    def embed(self, ids: torch.Tensor, tokens: Tokens):
        found = self.wte.lookup(ids).view(tokens.sequences, tokens.length, self.local_width)
        if tokens.documents:
            found = found + self.wpe.lookup(tokens.document_positions(ids.device)).view_as(found)
        else:
            found = found + self.wpe.lookup(tokens.positions(ids.device))
        return self.drop(scatter_rows(found.flatten(0, 1), tokens), tokens)

    def make_block(self, index: int):
        return Block(
            self.grid, self.shape, algorithm=self.algorithm, recompute=self.recompute, key=self.key / "blocks" / index,
            **self.factory,
        )  # fmt: skip

    def make_norm(self):
        return LayerNorm(self.grid, self.shape.width, key=self.key / "ln_f", **self.factory)


class Block(torch.nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), in the residual layout."""

    def __init__(
        self, grid: Grid, shape: GPT2Shape, *, algorithm: str | Algorithm, recompute: str = "none", key: RngKey,
        dtype: torch.dtype | None = None, device: torch.device | str | None = None,
    ):  # fmt: skip
        super().__init__()
        factory = Factory(dtype=dtype, device=device)
        products = {"std": STD, "std_out": STD / (2 * shape.layers) ** 0.5, "algorithm": algorithm, **factory}
        self.ln_1 = LayerNorm(grid, shape.width, key=key / "ln_1", **factory)
        self.attention = Attention(
            grid, shape.width, shape.heads, shape.dropout, recompute=recompute == "attention", key=key / "attention",
            **products,
        )  # fmt: skip
        self.ln_2 = LayerNorm(grid, shape.width, key=key / "ln_2", **factory)
        self.mlp = MLP(grid, shape.width, 4 * shape.width, key=key / "mlp", **products)
        self.drop_1 = Dropout(grid, shape.dropout, shape.width, key=key / "drop_1")
        self.drop_2 = Dropout(grid, shape.dropout, shape.width, key=key / "drop_2")

    def forward(self, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        x = x + self.drop_1(self.attention(self.ln_1(x, tokens), tokens), tokens)
        return x + self.drop_2(self.mlp(self.ln_2(x, tokens), tokens), tokens)
