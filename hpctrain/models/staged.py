"""A transformer cut into pipeline stages: what all kinds of models share."""

from __future__ import annotations

import abc
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hpctrain import comm
from hpctrain.choices import RECOMPUTE
from hpctrain.grid import Grid
from hpctrain.grid_shape import check_same_boxes, stage_holders
from hpctrain.layers import CrossEntropy, Embedding, Linear, Tokens, algorithm_of
from hpctrain.layers.embedding import scatter_rows
from hpctrain.layers.parameter import Factory
from hpctrain.layers.recompute import recomputed
from hpctrain.models.between_boxes import BetweenBoxes
from hpctrain.models.staged_model import StagedModel
from hpctrain.parameter import annotate, shard_of
from hpctrain.randomness import RngKey
from hpctrain.shard import split, split_sizes

if TYPE_CHECKING:
    from hpctrain.layers.algorithm import Algorithm

STD = 0.02  # standard deviation of initial embeddings and of the projection onto the vocabulary


class StagedTransformer(StagedModel[Tokens]):
    """This rank's part of a transformer: its pipeline stages, and of these its tensor shards.

    Parts: the token embedding `wte`, `blocks`, the final norm `ln_f`, the projection onto the vocabulary `head` and the
    loss. A kind of model gives its blocks and norm, and adds to the embedding what it likes.

    Args:
        grid: the process grid.
        shape: sizes of the whole model: `layers`, `width`, `context`, `vocabulary`, `tied`, and others of the kind.
        layers_per_stage: how many blocks each stage has, by default as equal as can be. The first stage also has the
            embeddings, the last the final norm, the projection onto the vocabulary and the loss.
        placement: {(replica, stage): rank of the pipeline axis}, as of a `pipeline.Schedule`; by default stage s is on
            rank s. A rank holds any number of stages.
        algorithm: the matrix product of the layers; see `layers.algorithm_of`.
        recompute: what is computed once more in backward, to save memory: "none", "attention" (all between queries,
            keys and values and their mixture) or "block" (of which only the input is kept).
        key: names the initial weights and dropout masks; both depend on nothing else.

    Attributes: `factory`, dtype and device for the layers, and those of `StagedModel`.

    Raises:
        ValueError: when layers_per_stage does not fit the shape and the placement, or recompute is unknown.
    """

    def __init__(
        self, grid: Grid, shape: Any, layers_per_stage: Sequence[int] | None = None,
        placement: Mapping[tuple[int, int], int] | None = None, *, algorithm: str | Algorithm = "agarwal",
        recompute: str = "none", key: RngKey, dtype: torch.dtype | None = None, device: torch.device | None = None,
    ):  # fmt: skip
        super().__init__()
        if recompute not in RECOMPUTE:
            raise ValueError(f"recompute must be one of {', '.join(RECOMPUTE)}, got {recompute!r}")
        if placement is None:
            placement = {(0, stage): stage for stage in range(grid.pipeline.size)}
        holders = stage_holders(placement)
        blocks = stage_blocks(shape.layers, len(holders), layers_per_stage)
        self.stages = {stage: blocks[stage] for stage, ranks in enumerate(holders) if grid.pipeline.rank in ranks}
        self.placement, self.last = placement, len(holders) - 1
        self.grid, self.shape, self.key, self.device, self.recompute = grid, shape, key, device, recompute
        self.algorithm = algorithm = algorithm_of(grid, algorithm)
        self.factory = factory = Factory(dtype=dtype, device=device)
        self.between = BetweenBoxes(grid, algorithm, shape.width)
        check_same_boxes(grid.boxes, holders, shape.tied)
        columns = split(shape.width, grid.tensor.y.size, grid.tensor.y.rank)
        self.local_width = columns.stop - columns.start

        if 0 in self.stages:
            self.wte = Embedding(grid, shape.vocabulary, shape.width, std=STD, key=key / "wte", **factory)
            self.extend_embedding()
        self.blocks = torch.nn.ModuleDict()
        for i in itertools.chain(*self.stages.values()):
            self.blocks[str(i)] = self.make_block(i)
        if self.last in self.stages:
            self.ln_f = self.make_norm()
            self.head = Linear(
                grid, shape.width, shape.vocabulary, bias=False, to="inner", algorithm=algorithm, std=STD,
                key=key / ("wte" if shape.tied else "head"), **factory,
            )  # fmt: skip
            if shape.tied and 0 in self.stages:
                self.head.weight = self.wte.weight
            self.cross_entropy = CrossEntropy(grid, shape.vocabulary, algorithm=algorithm)
        for stage in self.stages:
            for parameter in self.parameters_of(stage):
                set_holders(parameter, holders[stage])
        if shape.tied:  # tables on several ranks start equal, and get the same gradient
            if self.last in self.stages:
                annotate(self.head.weight, same_as="wte.weight")
            for module in (getattr(self, name, None) for name in ("wte", "head")):
                if module is not None:
                    set_holders(module.weight, sorted({*holders[0], *holders[-1]}))

    @abc.abstractmethod
    def make_block(self, index: int) -> torch.nn.Module:
        """Block `index` of the whole model: a module of (x, tokens) -> x in the residual layout."""

    @abc.abstractmethod
    def make_norm(self) -> torch.nn.Module:
        """The norm before the projection onto the vocabulary, a module of (x, tokens) -> x."""

    def extend_embedding(self) -> None:
        """Make what the first stage has between the token embedding and the first block: `embedding_modules`."""

    def embedding_modules(self) -> list[torch.nn.Module]:
        """Those of the first stage that have parameters, the token embedding first."""
        return [self.wte]

    def embed(self, ids: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        """Ids, (sequences × length,), to (rows, width) in the residual layout."""
        return scatter_rows(self.wte.lookup(ids), tokens)

    def parameters_of(self, stage: int) -> Iterator[torch.nn.Parameter]:
        modules = [self.blocks[str(i)] for i in self.stages[stage]]
        modules += self.embedding_modules() if stage == 0 else []
        modules += [self.ln_f, self.head] if stage == self.last else []
        return itertools.chain.from_iterable(module.parameters() for module in modules)

    def forward(self, x: torch.Tensor, tokens: Tokens, stage: int | None = None) -> torch.Tensor:
        """One stage of this rank, which may be left out where there is one. Stage 0 takes ids, (sequences × length,)
        int64, the others (rows, width) in the residual layout, which all but the last return; the last returns logits,
        (sequences × length, vocabulary) in the inner layout."""
        if stage is None:
            (stage,) = self.stages
        if stage == 0:
            x = self.embed(x, tokens)
        else:
            x = self.between.arrive(x, tokens, self.placement[0, stage - 1])
        for i in self.stages[stage]:
            block = self.blocks[str(i)]
            x = recomputed(block, x, tokens) if self.recompute == "block" else block(x, tokens)
        if stage == self.last:
            x = self.head(self.ln_f(x, tokens), tokens)
        return x

    def loss(self, output: torch.Tensor, targets: torch.Tensor, scale: float) -> torch.Tensor:
        """This rank's share of the sum of -log p(target), times `scale`; see `CrossEntropy`."""
        return self.cross_entropy(output, targets, scale)

    def tokens(self, sequences: int, length: int, documents: Sequence[Sequence[int]] = ()) -> Tokens:
        """This rank's part of a batch of sequences, for `forward`; `documents` as of `Tokens.of`."""
        return Tokens.of(self.grid, sequences, length, algorithm=self.algorithm, documents=documents)

    def last_logits(self, output: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        # The sequence lies on the first rank over which rows are spread; every rank has its part of the vocabulary.
        algorithm, vocabulary = self.algorithm, self.shape.vocabulary
        parts = [algorithm.inner(vocabulary, rank=rank) for rank in range(algorithm.columns.size)]
        counts = tuple(part.stop - part.start for part in parts)
        here = output[-1:].flatten() if len(output) else output.new_empty(counts[algorithm.columns.rank])
        comm.broadcast(here.contiguous(), algorithm.rows)
        whole = comm.all_gather(here, algorithm.columns, counts).contiguous()
        return comm.broadcast(whole, self.grid.sequence, root=tokens.holder_of_last).cpu()

    def message_spec(self, tokens: Tokens, stage: int) -> tuple[tuple[int, int], torch.dtype, torch.device | None]:
        shape = self.between.shape(tokens, self.placement[0, stage])
        return shape, next(self.parameters()).dtype, self.device


def stage_blocks(layers: int, stages: int, layers_per_stage: Sequence[int] | None = None) -> list[range]:
    """The blocks of each stage.

    >>> stage_blocks(5, 2)
    [range(0, 3), range(3, 5)]
    """
    counts = split_sizes(layers, stages) if layers_per_stage is None else layers_per_stage
    if len(counts) != stages or sum(counts) != layers or min(counts) < 1:
        raise ValueError(
            f"layers_per_stage must give at least one block to each of {stages} stages, {layers} in all, got {counts}"
        )
    starts = [0, *itertools.accumulate(counts)]
    return [range(*ends) for ends in itertools.pairwise(starts)]


def set_holders(parameter: torch.nn.Parameter, ranks: list[int]) -> None:
    """State which ranks of the pipeline axis hold this slice."""
    holders = tuple(ranks) if len(ranks) > 1 else ()
    annotate(parameter, shard=dataclasses.replace(shard_of(parameter), holders=holders))
