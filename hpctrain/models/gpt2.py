"""GPT-2: token and position embeddings, blocks of attention and MLP, layer norm, projection onto the vocabulary.

Source: Radford et al., "Language models are unsupervised multitask learners" (2019).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from hpctrain.layers import MLP, Attention, CrossEntropy, Dropout, Embedding, LayerNorm, Linear, Tokens, algorithm_of
from hpctrain.layers.embedding import scatter_rows
from hpctrain.randomness import Key
from hpctrain.shard import split


@dataclass(frozen=True)
class GPT2Shape:
    """Sizes of a GPT-2.

    Attributes:
        layers: blocks.
        width: features of the residual stream; a multiple of `heads`.
        heads: attention heads a block.
        context: positions.
        vocabulary: tokens.
        dropout: probability, in the embedding, the attention and before each residual sum.
        tied: the output projection is the token embedding.
    """

    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int
    dropout: float = 0.0
    tied: bool = True


class GPT2(torch.nn.Module):
    """This rank's part of a GPT-2: its pipeline stage, and of that its tensor shards.

    Args:
        grid: the process grid.
        shape: sizes of the whole model.
        blocks: numbers of the blocks of this rank's stage. By default they are dealt evenly to the stages. The first
            stage also has the embeddings, the last the final norm, the projection onto the vocabulary and the loss.
        algorithm: the matrix product of the layers; see `layers.algorithm_of`.
        key: names the initial weights and dropout masks; both depend on nothing else.
    """

    def __init__(self, grid, shape: GPT2Shape, blocks: range | None = None, *, algorithm="agarwal", key: Key,
                 dtype=None, device=None):  # fmt: skip
        super().__init__()
        stage, stages = grid.pipeline.rank, grid.pipeline.size
        if blocks is None:
            part = split(shape.layers, stages, stage)
            blocks = range(part.start, part.stop)
        self.shape, self.dtype, self.device = shape, dtype, device
        self.algorithm = algorithm = algorithm_of(grid, algorithm)
        self.first_stage, self.last_stage = stage == 0, stage == stages - 1
        width = split(shape.width, grid.tensor.y.size, grid.tensor.y.rank)
        self.held_width = width.stop - width.start
        made = {"dtype": dtype, "device": device}
        table = {"std": 0.02, "key": key / "wte", **made}
        stages_of_table = (0, stages - 1) if shape.tied and stages > 1 else ()

        if self.first_stage:
            self.wte = Embedding(grid, shape.vocabulary, shape.width, stages=stages_of_table, **table)
            self.wpe = Embedding(grid, shape.context, shape.width, std=0.02, key=key / "wpe", **made)
            self.drop = Dropout(grid, shape.dropout, shape.width, key=key / "drop")
        self.blocks = torch.nn.ModuleDict(
            {str(i): Block(grid, shape, algorithm=algorithm, key=key / "blocks" / i, **made) for i in blocks}
        )
        if self.last_stage:
            self.ln_f = LayerNorm(grid, shape.width, key=key / "ln_f", **made)
            if not shape.tied:
                table["key"] = key / "head"
            self.head = Linear(
                grid, shape.width, shape.vocabulary, bias=False, to="inner", algorithm=algorithm, **table
            )
            if shape.tied and self.first_stage:
                self.head.weight = self.wte.weight
            elif shape.tied:
                # The first stage's table and this one start equal, and get the same gradient.
                self.head.weight.shard = dataclasses.replace(self.head.weight.shard, stages=stages_of_table)
            self.cross_entropy = CrossEntropy(grid, shape.vocabulary, algorithm=algorithm)

    def forward(self, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        """One stage. The first takes ids, (sequences × length,) int64, the others (rows, width) in the residual layout,
        which all but the last return; the last returns logits, (sequences × length, vocabulary) in the inner layout."""
        if self.first_stage:
            positions = torch.arange(tokens.length, device=x.device)
            found = self.wte.lookup(x).view(tokens.sequences, tokens.length, self.held_width)
            found = found + self.wpe.lookup(positions)
            x = self.drop(scatter_rows(found.flatten(0, 1), tokens), tokens)
        for block in self.blocks.values():
            x = block(x, tokens)
        if self.last_stage:
            x = self.head(self.ln_f(x, tokens), tokens)
        return x

    def loss(self, logits: torch.Tensor, targets: torch.Tensor, scale: float) -> torch.Tensor:
        """This rank's share of the sum of -log p(target), times `scale`; see `CrossEntropy`."""
        return self.cross_entropy(logits, targets, scale)

    def empty_activation(self, tokens: Tokens) -> torch.Tensor:
        """Room for what the previous stage sends."""
        return torch.empty(len(tokens.residual_rows), self.held_width, dtype=self.dtype, device=self.device)


class Block(torch.nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), in the residual layout."""

    def __init__(self, grid, shape: GPT2Shape, *, algorithm, key: Key, dtype=None, device=None):
        super().__init__()
        made = {"dtype": dtype, "device": device}
        products = {"std": 0.02, "std_out": 0.02 / (2 * shape.layers) ** 0.5, "algorithm": algorithm, **made}
        self.ln_1 = LayerNorm(grid, shape.width, key=key / "ln_1", **made)
        self.attention = Attention(grid, shape.width, shape.heads, shape.dropout, key=key / "attention", **products)
        self.ln_2 = LayerNorm(grid, shape.width, key=key / "ln_2", **made)
        self.mlp = MLP(grid, shape.width, 4 * shape.width, key=key / "mlp", **products)
        self.drop_1 = Dropout(grid, shape.dropout, shape.width, key=key / "drop_1")
        self.drop_2 = Dropout(grid, shape.dropout, shape.width, key=key / "drop_2")

    def forward(self, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        x = x + self.drop_1(self.attention(self.ln_1(x, tokens), tokens), tokens)
        return x + self.drop_2(self.mlp(self.ln_2(x, tokens), tokens), tokens)
