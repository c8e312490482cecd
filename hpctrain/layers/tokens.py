"""Tokens: which rows of a microbatch this rank works on."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hpctrain.grid import Grid
from hpctrain.layers.algorithm import Algorithm, algorithm_of
from hpctrain.layers.context.mask import Mask
from hpctrain.layers.context.sharded_kv_cache import ShardedKVCache
from hpctrain.layers.context.spans import Spans, part_of, sequence_spans, span_length
from hpctrain.layers.decisions import Decisions
from hpctrain.layers.kv_cache import InferenceCache, KVCache
from hpctrain.matmul.sharded_dim import Rows
from hpctrain.shard import split


@dataclass(frozen=True)
class Tokens:
    """The tokens of one microbatch in this rank's z block: `sequences` × `length` rows, sequence by sequence.

    Attributes:
        sequences: those of the z block (0 is legal).
        length: tokens of a sequence that are here (0 is legal).
        first: number of the block's first sequence within the global batch of the step.
        step: training step, for the dropout masks.
        rows: how the block's rows are spread over x in the residual layout.
        inner: numbers, within the global batch, of the sequences that this rank holds in the inner layout.
        over_z: residual rows of the ranks of z at this rank's x.
        whole: tokens of a whole sequence.
        documents: lengths of the documents that each sequence of the z block is packed of, within which its tokens
            attend; () for one document of each sequence.
        over_sequence: positions, within each sequence, of the tokens that the ranks of the sequence axis have.
        kv_cache: what attention keeps of the tokens before these; None where there are none.
        share: what a sequence counts in the mean of an auxiliary loss: one over the sequences of the step, on all
            replicas, which a Trainer multiplies by the scale of the loss; 0 for no such loss.
        decisions: what layers that are computed once more decided the first time; None where they are not.
    """

    sequences: int
    length: int
    first: int
    step: int
    rows: Rows
    inner: range
    over_z: tuple[int, ...]
    whole: int
    documents: tuple[tuple[int, ...], ...]
    over_sequence: tuple[Spans, ...]
    kv_cache: KVCache | InferenceCache | ShardedKVCache | None
    _given: tuple = field(repr=False, compare=False)  # what these are a part of: grid, sequences, first, algorithm
    share: float = 0.0
    decisions: Decisions | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(
        cls, grid: Grid, sequences: int, length: int, first: int = 0, step: int = 0,
        algorithm: str | Algorithm = "agarwal", part: slice | None = None,
        kv_cache: KVCache | InferenceCache | ShardedKVCache | None = None,
        balance: str = "zigzag",
        documents: Sequence[Sequence[int]] = (), window: int = 0, share: float | None = None,
    ) -> Tokens:  # fmt: skip
        """The part of this rank's z block in a microbatch of `sequences` that starts at sequence `first`.

        `algorithm` is that of the layers which the tokens pass through. With `part`, these tokens of every sequence;
        those before them have passed already, with the same `kv_cache`. Ranks of sequence axes share the first part,
        and each has all of the later ones, which a `ShardedKVCache` asks for. `balance` is how the ring cuts sequences;
        see `context.spans.sequence_spans`; "work" goes by the `documents` of the microbatch's sequences and by the
        `window` of the layers, alike on all ranks. `share` is by default that of a step of this microbatch alone, of as
        many sequences on every replica, and 0 with `part` or `kv_cache`; of several microbatches, say one over the
        sequences of all.

        Raises:
            ValueError: for negative numbers, for `part` beside documents, or on a grid with sequence axes without a
                `ShardedKVCache`, and for documents that are not of these sequences.
        """
        if sequences < 0 or length < 0:
            raise ValueError(f"sequences and length must be from 0 on, got {sequences} and {length}")
        packed = tuple(tuple(lengths) for lengths in documents)
        if packed and len(packed) != sequences:
            raise ValueError(f"documents must be lengths for each of {sequences} sequences, got {packed}")
        masks = tuple(Mask(window=window, documents=lengths) for lengths in packed or ((),))
        for mask in masks:
            mask.document_ranges(length)
        cut_by = masks if balance == "work" else (Mask(),)
        whole, over_sequence = length, _cut(length, grid.ring.size, grid.ulysses.size, balance, cut_by)
        if part is not None:
            if packed:
                raise ValueError("token slices attend to all tokens before them, got documents; use another schedule")
            over_sequence = ((range(part.start, part.stop),),) * grid.sequence.size
            if grid.sequence.size > 1 and part.start == 0:
                over_sequence = _cut(part.stop, grid.ring.size, grid.ulysses.size, balance, cut_by)
            if grid.sequence.size > 1 and not isinstance(kv_cache, ShardedKVCache):
                raise ValueError(
                    f"token slices and sequence axes both cut sequences, got grid.data = (…, {grid.ring.size}, "
                    f"{grid.ulysses.size}) and a part; use another schedule than terapipe, or grid.data = N"
                )
        length = span_length(over_sequence[grid.sequence.rank])
        algorithm = algorithm_of(grid, algorithm)
        x, z = grid.tensor.x, grid.tensor.z
        blocks = [split(sequences, z.size, rank) for rank in range(z.size)]
        over = [algorithm.rows_over_x(block.stop - block.start, length) for block in blocks]
        block = blocks[z.rank]
        if share is None:
            share = 0.0 if part is not None or kv_cache is not None else 1 / max(1, sequences * grid.replica.size)
        mine, start = block.stop - block.start, first + block.start
        inner = algorithm.inner_sequences(mine)
        return cls(
            mine, length, start, step, Rows(x, over[z.rank]), range(start + inner.start, start + inner.stop),
            tuple(counts[x.rank] for counts in over), whole, packed[block], over_sequence, kv_cache,
            (grid, sequences, first, algorithm), share,
        )  # fmt: skip

    def part(self, part: slice, kv_cache: KVCache | InferenceCache | ShardedKVCache) -> Tokens:
        """These tokens of every sequence."""
        grid, sequences, first, algorithm = self._given
        return Tokens.of(grid, sequences, self.whole, first, self.step, algorithm, part, kv_cache, share=self.share)

    @property
    def grid(self) -> Grid:
        """The one that they were made for."""
        return self._given[0]

    @property
    def all_sequences(self) -> int:
        """Of the microbatch, in all z blocks."""
        return self._given[1]

    def decide(self, choice: Callable) -> tuple[Any, bool]:
        """`choice()`, or what it was when this was computed before; and whether it is the first time: by
        torch.utils.checkpoint, which keeps no `decisions`, a layer is computed once more within a backward."""
        if self.decisions is None:
            return choice(), torch._C._current_graph_task_id() == -1
        return self.decisions.decide(choice)

    @property
    def spans(self) -> Spans:
        """Positions of the tokens of a sequence that are here, in their order."""
        return self.over_sequence[self.grid.sequence.rank]

    def positions(self, device: torch.device | None = None) -> torch.Tensor:
        """The same as a tensor, (length,) int64."""
        return torch.cat([torch.arange(0), *(torch.arange(span.start, span.stop) for span in self.spans)]).to(device)

    def document_positions(self, device: torch.device | None = None) -> torch.Tensor:
        """Those of all sequences within their documents, (sequences × length,) int64."""
        here, found = self.positions(), [torch.empty(0, dtype=torch.int64)]
        for lengths in self.documents:
            starts = torch.tensor([0, *itertools.accumulate(lengths)][:-1])
            found.append(here - starts.repeat_interleave(torch.tensor(lengths))[here])
        return torch.cat(found).to(device)

    @property
    def inner_documents(self) -> tuple[tuple[int, ...], ...]:
        """Those of each sequence that this rank holds in the inner layout; () for one document."""
        if not self.documents:
            return ((),) * len(self.inner)
        return self.documents[self.inner.start - self.first : self.inner.stop - self.first]

    @property
    def holder_of_last(self) -> int:
        """The rank of the sequence axis whose last token is the last of a sequence."""
        return next(rank for rank, spans in enumerate(self.over_sequence) if spans and spans[-1].stop == self.whole)

    @property
    def local_rows(self) -> int:
        """How many rows this rank has in the residual layout."""
        return self.rows.sizes[self.rows.axis.rank]

    def residual_rows(self) -> list[range]:
        """This rank's rows in the residual layout, numbered through the whole batch of the step, in runs."""
        start, length = sum(self.rows.sizes[: self.rows.axis.rank]), self.length
        stop = start + self.local_rows
        if length == self.whole:
            before = self.first * length
            return [range(before + start, before + stop)]
        runs = []
        for sequence in range(start // length, -(-stop // length)) if length else ():
            before = (self.first + sequence) * self.whole
            local = part_of(self.spans, max(0, start - sequence * length), min(length, stop - sequence * length))
            runs += [range(before + span.start, before + span.stop) for span in local]
        return runs


@functools.lru_cache(maxsize=64)  # every microbatch asks for the same one
def _cut(length, ring, ulysses, balance, masks):
    return tuple(sequence_spans(length, ring, ulysses, balance, masks))
