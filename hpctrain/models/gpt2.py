"""GPT-2: token and position embeddings, blocks of attention and MLP, layer norm, projection onto the vocabulary.

Source: Radford et al., "Language models are unsupervised multitask learners" (2019).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from hpctrain.algorithms import RECOMPUTE
from hpctrain.layers import MLP, Attention, CrossEntropy, Dropout, Embedding, LayerNorm, Linear, Tokens, algorithm_of
from hpctrain.layers.embedding import scatter_rows
from hpctrain.layers.recompute import recomputed
from hpctrain.randomness import Key
from hpctrain.shard import split, split_sizes


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
        cut: how many blocks each stage has, by default as equal as can be. The first stage also has the embeddings, the
            last the final norm, the projection onto the vocabulary and the loss.
        placement: {(replica, stage): rank of the pipeline axis}, as of a `pipeline.Schedule`; by default stage s is on
            rank s. A rank holds any number of stages.
        algorithm: the matrix product of the layers; see `layers.algorithm_of`.
        recompute: what is computed once more in backward, to save memory: "none", "attention" (all between queries,
            keys and values and their mixture) or "block" (of which only the input is kept).
        key: names the initial weights and dropout masks; both depend on nothing else.
    """

    def __init__(self, grid, shape: GPT2Shape, cut: Sequence[int] | None = None,
                 placement: Mapping[tuple[int, int], int] | None = None, *, algorithm="agarwal",
                 recompute: str = "none", key: Key, dtype=None, device=None):  # fmt: skip
        super().__init__()
        if recompute not in RECOMPUTE:
            raise ValueError(f"recompute must be one of {', '.join(RECOMPUTE)}, got {recompute!r}")
        if placement is None:
            placement = {(0, stage): stage for stage in range(grid.pipeline.size)}
        stages = 1 + max(stage for _, stage in placement)
        cut = split_sizes(shape.layers, stages) if cut is None else cut
        if len(cut) != stages or sum(cut) != shape.layers or min(cut) < 1:
            raise ValueError(
                f"cut must give at least one block to each of {stages} stages, {shape.layers} in all, got {cut}"
            )
        starts = [0, *itertools.accumulate(cut)]
        holders = [sorted({rank for (_, s), rank in placement.items() if s == stage}) for stage in range(stages)]
        self.stages = {  # of this rank: number -> blocks
            s: range(starts[s], starts[s + 1]) for s in range(stages) if grid.pipeline.rank in holders[s]
        }
        self.placement, self.last = placement, stages - 1
        self.shape, self.device, self.recompute = shape, device, recompute
        self.algorithm = algorithm = algorithm_of(grid, algorithm)
        width = split(shape.width, grid.tensor.y.size, grid.tensor.y.rank)
        self.held_width = width.stop - width.start
        made = {"dtype": dtype, "device": device}
        table = {"std": 0.02, "key": key / "wte", **made}

        if 0 in self.stages:
            self.wte = Embedding(grid, shape.vocabulary, shape.width, **table)
            self.wpe = Embedding(grid, shape.context, shape.width, std=0.02, key=key / "wpe", **made)
            self.drop = Dropout(grid, shape.dropout, shape.width, key=key / "drop")
        self.blocks = torch.nn.ModuleDict()
        for blocks in self.stages.values():
            algorithm.begin_stage()
            for i in blocks:
                self.blocks[str(i)] = Block(
                    grid, shape, algorithm=algorithm, recompute=recompute, key=key / "blocks" / i, **made
                )
        if self.last in self.stages:
            self.ln_f = LayerNorm(grid, shape.width, key=key / "ln_f", **made)
            if not shape.tied:
                table["key"] = key / "head"
            self.head = Linear(
                grid, shape.width, shape.vocabulary, bias=False, to="inner", algorithm=algorithm, **table
            )
            if shape.tied and 0 in self.stages:
                self.head.weight = self.wte.weight
            self.cross_entropy = CrossEntropy(grid, shape.vocabulary, algorithm=algorithm)
        for stage in self.stages:
            for parameter in self.parameters_of(stage):
                _held_by(parameter, holders[stage])
        if shape.tied:  # tables on several ranks start equal, and get the same gradient
            if self.last in self.stages:
                self.head.weight.same_as = "wte.weight"  # its name in checkpoints
            for module in (getattr(self, name, None) for name in ("wte", "head")):
                if module is not None:
                    _held_by(module.weight, sorted({*holders[0], *holders[-1]}))

    def parameters_of(self, stage: int) -> Iterator[torch.nn.Parameter]:
        """Those that a stage of this rank computes with."""
        modules = [self.blocks[str(i)] for i in self.stages[stage]]
        modules += [self.wte, self.wpe] if stage == 0 else []
        modules += [self.ln_f, self.head] if stage == self.last else []
        return itertools.chain.from_iterable(module.parameters() for module in modules)

    def forward(self, x: torch.Tensor, tokens: Tokens, stage: int | None = None) -> torch.Tensor:
        """One stage of this rank, which may be left out where there is one. Stage 0 takes ids, (sequences × length,)
        int64, the others (rows, width) in the residual layout, which all but the last return; the last returns logits,
        (sequences × length, vocabulary) in the inner layout."""
        if stage is None:
            (stage,) = self.stages
        if stage == 0:
            positions = torch.arange(tokens.position, tokens.position + tokens.length, device=x.device)
            found = self.wte.lookup(x).view(tokens.sequences, tokens.length, self.held_width)
            found = found + self.wpe.lookup(positions)
            x = self.drop(scatter_rows(found.flatten(0, 1), tokens), tokens)
        for i in self.stages[stage]:
            block = self.blocks[str(i)]
            x = recomputed(block, x, tokens) if self.recompute == "block" else block(x, tokens)
        if stage == self.last:
            x = self.head(self.ln_f(x, tokens), tokens)
        return x

    def loss(self, logits: torch.Tensor, targets: torch.Tensor, scale: float) -> torch.Tensor:
        """This rank's share of the sum of -log p(target), times `scale`; see `CrossEntropy`."""
        return self.cross_entropy(logits, targets, scale)

    def room(self, tokens: Tokens) -> tuple[tuple[int, int], torch.dtype, torch.device]:
        """Shape, dtype and device of what a stage gives to the next one."""
        return (tokens.held_rows, self.held_width), next(self.parameters()).dtype, self.device


def _held_by(parameter, ranks: list[int]) -> None:
    """State which ranks of the pipeline axis hold this slice."""
    parameter.shard = dataclasses.replace(parameter.shard, holders=tuple(ranks) if len(ranks) > 1 else ())


class Block(torch.nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), in the residual layout."""

    def __init__(self, grid, shape: GPT2Shape, *, algorithm, recompute: str = "none", key: Key, dtype=None,
                 device=None):  # fmt: skip
        super().__init__()
        made = {"dtype": dtype, "device": device}
        products = {"std": 0.02, "std_out": 0.02 / (2 * shape.layers) ** 0.5, "algorithm": algorithm, **made}
        self.ln_1 = LayerNorm(grid, shape.width, key=key / "ln_1", **made)
        self.attention = Attention(
            grid, shape.width, shape.heads, shape.dropout, recompute=recompute == "attention", key=key / "attention",
            **products,
        )  # fmt: skip
        self.ln_2 = LayerNorm(grid, shape.width, key=key / "ln_2", **made)
        self.mlp = MLP(grid, shape.width, 4 * shape.width, key=key / "mlp", **products)
        self.drop_1 = Dropout(grid, shape.dropout, shape.width, key=key / "drop_1")
        self.drop_2 = Dropout(grid, shape.dropout, shape.width, key=key / "drop_2")

    def forward(self, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        x = x + self.drop_1(self.attention(self.ln_1(x, tokens), tokens), tokens)
        return x + self.drop_2(self.mlp(self.ln_2(x, tokens), tokens), tokens)
