"""The loss of a trained model over packed data, of all of it or of each document by itself."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from hpctrain import comm
from hpctrain.data import ShardedTokens
from hpctrain.grid import Grid
from hpctrain.models.staged_model import StagedModel
from hpctrain.pipeline import forward_only
from hpctrain.pipeline.executor import Executor
from hpctrain.train.batches import IGNORED, Microbatch, document_lengths
from hpctrain.train.stages import Stages

BLOCK = 1 << 20  # tokens that are looked through at once for the ends of documents


@dataclass(frozen=True)
class Loss:
    """Of some text: the sum of -log p over its tokens that count, how many these are, and the bytes of their text."""

    total: float
    tokens: int
    bytes: int

    @property
    def mean(self) -> float:
        """Nats a token."""
        return self.total / max(1, self.tokens)

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.mean, 700.0))

    @property
    def bits_per_byte(self) -> float:
        """Comparable between tokenizers."""
        return self.total / math.log(2) / max(1, self.bytes)


def documents_of(tokens: ShardedTokens) -> Iterator[tuple[int, int]]:
    """(first, last + 1) of every document, with the token that ends it."""
    start = 0
    for block in range(0, tokens.tokens, BLOCK):
        found = tokens.read(block, min(BLOCK, tokens.tokens - block))
        for end in (np.flatnonzero(found == tokens.end_of_document) + block + 1).tolist():
            yield start, end
            start = end
    if start < tokens.tokens:
        yield start, tokens.tokens


def evaluate(
    model: StagedModel, grid: Grid, tokens: ShardedTokens, context: int, batch: int, by_document: bool = False,
    masked: bool = False,
) -> list[Loss]:  # fmt: skip
    """The loss of all tokens, or of every document, in windows of `context` tokens: every token is predicted once, from
    those before it in its window; the first of all, and of each document, from the token that ends documents.
    Collective over the grid; the same on all ranks.

    Args:
        batch: windows at a time on a replica.
        masked: tokens see their own document alone, and the first of each counts in no loss, as in a training with
            `data.documents` = "masked".
    """
    with comm.together(grid.world):
        parts = list(documents_of(tokens)) if by_document else [(0, tokens.tokens)]
    pieces = [  # part, and its windows' first tokens
        (number, starts)
        for number, (start, stop) in enumerate(parts)
        for starts in _batched(range(start, stop, context), batch)
    ]
    end = tokens.end_of_document if masked else None
    mine = pieces[grid.replica.rank :: grid.replica.size]
    most = -(-len(pieces) // grid.replica.size)  # of a replica: all run as often, as their experts may be shared
    sums = torch.zeros(len(parts), dtype=torch.float64)
    counts = torch.zeros(len(parts), dtype=torch.int64)
    stages = grid.pipeline.size
    executor = Executor(grid.pipeline, forward_only(stages, stages, model.placement))
    model.eval()
    with torch.no_grad():
        for first in range(0, most, stages):  # a microbatch a stage fills the pipeline
            together, microbatches = mine[first : first + stages], []
            for number, starts in together:
                try:
                    ids, targets = _windows(tokens, starts, parts[number][1], context)
                except (ValueError, OSError) as error:  # of this rank alone, which the others would wait for
                    raise RuntimeError(f"windows from token {starts[0]} on cannot be read: {error}") from error
                if masked:
                    targets[ids == end] = IGNORED
                counts[number] += int((targets != IGNORED).sum())
                microbatches.append(_microbatch(model, ids, targets, end))
            empty = torch.empty(0, context, dtype=torch.int64)
            microbatches += [_microbatch(model, empty, empty, end)] * (stages - len(microbatches))
            losses = executor.run(Stages(model, microbatches))
            for (number, _), loss in zip(together, losses):
                sums[number] += loss.double().cpu()
    comm.all_reduce(sums, grid.world)
    comm.all_reduce(counts, grid.replica)
    with comm.together(grid.world):
        bytes_of = [_bytes(tokens, part, masked) for part in (parts if by_document else documents_of(tokens))]
    bytes_of = bytes_of if by_document else [sum(bytes_of)]
    return [Loss(*each) for each in zip(sums.tolist(), counts.tolist(), bytes_of)]


def _windows(tokens, starts, stop: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and targets, (windows, context), IGNORED behind the end and where the data say so."""
    ids = torch.full((len(starts), context), tokens.end_of_document)
    targets = torch.full((len(starts), context), IGNORED)
    for row, start in enumerate(starts):
        count = min(context, stop - start)
        before = [tokens.end_of_document] if start == 0 else tokens.read(start - 1, 1)
        read = torch.from_numpy(np.concatenate([before, tokens.read(start, count)]))
        ids[row, :count] = read[:-1] % tokens.vocabulary
        targets[row, :count] = torch.where(read[1:] < tokens.vocabulary, read[1:], IGNORED)
    return ids, targets


def _microbatch(
    model: StagedModel, ids: torch.Tensor, targets: torch.Tensor, end_of_document: int | None
) -> Microbatch:
    """This rank's part; with the token that ends documents, where these see themselves alone."""
    known = {} if end_of_document is None else {"documents": document_lengths(ids, end_of_document)}
    tokens = model.tokens(len(ids), ids.shape[1], **known)
    here = tokens.positions()
    block = ids[tokens.first : tokens.first + tokens.sequences][:, here].reshape(-1)
    inner = targets[tokens.inner.start : tokens.inner.stop][:, here].reshape(-1)
    return Microbatch(tokens, block.to(model.device), inner.to(model.device), 1.0)


def _bytes(tokens: ShardedTokens, document: tuple[int, int], without_first: bool) -> int:
    """Of the text of a document's tokens that count. A first token that is a part of a character is one byte of it."""
    found = tokens.read(document[0], document[1] - document[0])
    counted, decode = found[found < tokens.vocabulary].tolist(), tokens.tokenizer.decode
    total = len(decode(counted).encode())
    if without_first and found[0] < tokens.vocabulary:
        first = decode(counted[:1])
        total -= 1 if "\ufffd" in first else len(first.encode())
    return total


def _batched(items, size: int) -> Iterator[list]:
    items = iter(items)
    while batch := list(itertools.islice(items, size)):
        yield batch
