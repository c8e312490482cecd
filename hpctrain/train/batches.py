"""The microbatches that this rank works on, read from packed tokens."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hpctrain import comm
from hpctrain.data import MixedOrder, SampleOrder, ShardedTokens
from hpctrain.grid import Grid
from hpctrain.layers import Tokens
from hpctrain.pipeline import Schedule
from hpctrain.randomness import RngKey
from hpctrain.shard import split, subsplit

IGNORED = -100  # as torch has it, and `layers.CrossEntropy`


@dataclass(frozen=True)
class Microbatch:
    """One microbatch: the ids of this rank's z block, the targets of the rows it holds in the inner layout, both int64.

    Of a sequence that several ranks share, those of this rank's tokens. `ids` are there where the first pipeline stage
    is, `targets` where the last is, IGNORED where they count in no loss. `scale` is one over the number of targets that
    count, over all replicas, of the step, or of those microbatches of it that share an update.
    """

    tokens: Tokens
    ids: torch.Tensor | None
    targets: torch.Tensor | None
    scale: float


class Samples:
    """Packed data cut into samples of `context` + 1 tokens, the last of each being the first of the next.

    Several sources are mixed in the proportion of `weights`. The last `validation` part of each one's samples is held
    out, or `validation_tokens` where these are given. `tokens_of` gives a rank's part of a microbatch, as
    `ModelSpec.tokens`; the last `idle` ranks of the replica axis get none of a batch. Where `documents` are "masked",
    tokens know their documents, and what follows the last token of one counts in no loss.

    Attributes: `held_out`, how many samples are validated on at most: as many as repeat none of any source.

    Raises:
        ValueError: when there are too few tokens for one training and one validation sample of each source.
    """

    def __init__(
        self, tokens: ShardedTokens | Sequence[ShardedTokens], context: int, validation: float, key: RngKey,
        tokens_of: Callable[..., Tokens] = Tokens.of, idle: int = 0, weights: Sequence[float] = (1.0,),
        validation_tokens: ShardedTokens | None = None, documents: str = "packed",
    ):  # fmt: skip
        self.context, self.tokens_of, self.idle = context, tokens_of, idle
        self.masked_documents = documents == "masked"
        self.sources = list(tokens) if isinstance(tokens, Sequence) else [tokens]
        apart = [validation_tokens] if validation_tokens else []
        totals = [(each.tokens - 1) // context for each in self.sources + apart]
        self._firsts = [0, *itertools.accumulate(totals)][:-1]  # samples are numbered through all sources
        validated = [0 if apart else max(1, round(total * validation)) for total in totals]
        for each, total, out in zip(self.sources + apart, totals, validated):
            if total - out < 1:
                raise ValueError(
                    f"{each.path} has {each.tokens} tokens, too few for a training and a validation sample of "
                    f"model.context = {context}; use more text or a smaller context"
                )
        names = [key, *(key / number for number in range(1, len(self.sources)))]
        trained = [total - out for total, out in zip(totals, validated)][: len(self.sources)]
        orders = [SampleOrder(count, name / "training") for count, name in zip(trained, names)]
        self.training = MixedOrder(orders, weights, self._firsts)
        self.sources += apart
        if apart:
            self.validation = MixedOrder([SampleOrder(totals[-1], key / "validation")], [1.0], self._firsts[-1:])
        else:
            orders = [SampleOrder(count, name / "validation") for count, name in zip(validated, names)]
            self.validation = MixedOrder(orders, weights, [a + b for a, b in zip(self._firsts, trained)])
        self.held_out = _without_repeats(self.validation)
        # a step's own batch, and the next one, which it prefetches
        self._batch = functools.lru_cache(2)(lambda n, batch: self.training[n * batch : (n + 1) * batch])

    def epochs(self, samples: int) -> dict[str, float]:
        """How often each source has been gone through, by its path, after so many samples of training."""
        taken = zip(self.sources, self.training.taken(samples), self.training.orders)
        return {str(tokens.path): count / order.samples for tokens, count, order in taken}

    def _place(self, number: int) -> tuple[ShardedTokens, int]:
        """Where a sample's tokens are, and the first of them there."""
        source = bisect.bisect_right(self._firsts, number) - 1
        return self.sources[source], (number - self._firsts[source]) * self.context

    def read(self, numbers: np.ndarray, spans: tuple[range, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens at the positions of `spans` of these samples, and those one after them, both (samples, tokens);
        these are IGNORED where they count in no loss."""
        parts = [torch.empty(len(numbers), len(span) + 1, dtype=torch.int64) for span in spans]
        for span, part in zip(spans, parts):
            for row, number in zip(part.numpy(), numbers.tolist()):
                tokens, start = self._place(number)
                tokens.read(start + span.start, len(span) + 1, row)
        nothing = torch.empty(len(numbers), 0, dtype=torch.int64)
        found = ([nothing, *(part[:, which] for part in parts)] for which in (slice(None, -1), slice(1, None)))
        ids, targets = (torch.cat(columns, 1) for columns in found)
        if self.masked:
            vocabulary = self.sources[0].vocabulary
            ids, targets = ids % vocabulary, targets.masked_fill(targets >= vocabulary, IGNORED)
        if self.masked_documents:
            targets[ids == self.sources[0].end_of_document] = IGNORED
        return ids, targets

    @property
    def masked(self) -> bool:
        """Whether some tokens count in no loss."""
        return self.masked_documents or any(tokens.masked for tokens in self.sources)

    def training_step(
        self, grid: Grid, number: int, batch: int, schedule: Schedule, device: torch.device, step: int
    ) -> list[Microbatch]:
        """This rank's microbatches of batch `number` (from 0) of the order, of `batch` sequences over all replicas, for
        training step `step` (from 0): the same number, unless batches were left out."""
        microbatches = self._microbatches(grid, self._batch(number, batch), schedule, step, device)
        self._prefetch(grid, self._batch(number + 1, batch))
        return microbatches

    def _prefetch(self, grid, order) -> None:
        """Have the system read what this replica's ranks will ask for next, while they train."""
        working = grid.replica.size - self.idle
        if grid.replica.rank < working:
            spans = (range(self.context),) if self.masked_documents else self.tokens_of(grid, 1, self.context).spans
            for number in order[split(len(order), working, grid.replica.rank)].tolist():
                tokens, start = self._place(number)
                for span in spans:
                    tokens.will_need(start + span.start, len(span) + 1)

    def validation_batches(
        self, grid: Grid, batch: int, batches: int, schedule: Schedule, device: torch.device
    ) -> list[list[Microbatch]]:
        """This rank's microbatches of up to `batches` validation batches; the same ones at every call."""
        total = min(batches * batch, self.held_out)
        orders = [self.validation[start : min(start + batch, total)] for start in range(0, total, batch)]
        validation = [self._microbatches(grid, order, schedule, 0, device, total) for order in orders]
        if self.masked:
            counted = sum(self._counted(grid, part, total_of) for part, total_of in zip(validation, map(len, orders)))
            validation = [
                [dataclasses.replace(each, scale=1 / max(1, counted)) for each in part] for part in validation
            ]
        return validation

    def _counted(self, grid, microbatches, sequences: int) -> int:
        """How many targets of these microbatches, of so many sequences over all replicas, count; collective. Ranks of
        the tensor axis may have the same ones, all of them equally often."""
        targets = [each.targets for each in microbatches if each.targets is not None]
        counted = sum(int((each != IGNORED).sum()) for each in targets)
        totals = torch.tensor([counted, sum(map(len, targets))])
        for axis in (grid.tensor, grid.data, grid.pipeline):
            comm.all_reduce(totals, axis)
        counted, copies = totals.tolist()
        return counted * sequences * self.context // max(1, copies)

    def _microbatches(self, grid, order, schedule, step, device, total=None):
        length, here = self.context, grid.pipeline.rank
        working = grid.replica.size - self.idle
        parts = [split(len(order), working, rank) for rank in range(working)]
        parts += [slice(len(order), len(order))] * self.idle
        cuts = [[subsplit(part, schedule.microbatches, m) for m in range(schedule.microbatches)] for part in parts]
        sequences = {}  # of all that share the microbatch's update
        for update in schedule.updates:
            together = sum(cut[m].stop - cut[m].start for cut in cuts for m in update)
            sequences.update(dict.fromkeys(update, max(1, together)))
        microbatches = []
        for m, part in enumerate(cuts[grid.replica.rank]):
            replica = schedule.replica_of[m]
            first = schedule.placement[replica, 0] == here
            last = schedule.placement[replica, schedule.graph.stages - 1] == here
            scale = 1 / ((total or sequences[m]) * length)
            known, whole = {}, None
            if self.masked_documents:  # which all ranks that share the sequences know
                whole = self.read(order[part], (range(length),))
                known["documents"] = document_lengths(whole[0], self.sources[0].end_of_document)
            tokens = self.tokens_of(grid, part.stop - part.start, length, part.start, step, **known)
            tokens = dataclasses.replace(tokens, share=1 / sequences[m] if total is None else 0.0)
            ids = targets = None
            if first or last:
                block = slice(tokens.first, tokens.first + tokens.sequences)
                if whole is None:
                    inputs, following = self.read(order[block], tokens.spans)
                else:
                    rows = slice(block.start - part.start, block.stop - part.start)
                    inputs, following = (each[rows][:, tokens.positions()] for each in whole)
                ids = inputs.reshape(-1).to(device) if first else None
                inner = slice(tokens.inner.start - tokens.first, tokens.inner.stop - tokens.first)
                targets = following[inner].reshape(-1).to(device) if last else None
            microbatches.append(Microbatch(tokens, ids, targets, scale))
        if self.masked and total is None:
            for update in schedule.updates:
                counted = self._counted(grid, [microbatches[m] for m in update], sequences[next(iter(update))])
                for m in update:
                    microbatches[m] = dataclasses.replace(microbatches[m], scale=1 / max(1, counted))
        return microbatches


def document_lengths(ids: torch.Tensor, end_of_document: int) -> list[list[int]]:
    """Lengths of the documents of each of (sequences, length) ids, which sum to its length; the token that ends a
    document belongs to it."""
    lengths = []
    for row in ids:
        ends = (row == end_of_document).nonzero().flatten().add(1).tolist()
        edges = [0, *ends] if ends and ends[-1] == len(row) else [0, *ends, len(row)]
        lengths.append([stop - start for start, stop in itertools.pairwise(edges)])
    return lengths


def _without_repeats(order: MixedOrder) -> int:
    """How many of its first samples are all different ones."""
    available = [each.samples for each in order.orders]
    period = sum(order.counts)
    count = 1 + min((samples + 1) * period // each for samples, each in zip(available, order.counts))
    while count > 1 and any(taken > samples for taken, samples in zip(order.taken(count), available)):
        count -= 1
    return count
