"""The microbatches that this rank works on, read from packed tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from hpctrain.data import SampleOrder, ShardedTokens
from hpctrain.grid import Grid
from hpctrain.layers import Tokens
from hpctrain.pipeline import Schedule
from hpctrain.randomness import RngKey
from hpctrain.shard import split, subsplit


@dataclass(frozen=True)
class Microbatch:
    """One microbatch: the ids of this rank's z block, the targets of the rows it holds in the inner layout, both int64.

    Of a sequence that several ranks share, those of this rank's tokens. `ids` are there where the first pipeline stage
    is, `targets` where the last is. `scale` is one over the number of targets, over all replicas, of the step, or of
    those microbatches of it that share an update.
    """

    tokens: Tokens
    ids: torch.Tensor | None
    targets: torch.Tensor | None
    scale: float


class Samples:
    """A corpus cut into samples of `context` + 1 tokens, the last of each being the first of the next.

    The last `validation` part of the samples is held out. `tokens_of` gives a rank's part of a microbatch, as
    `ModelSpec.tokens`; the last `idle` ranks of the replica axis get none of a batch.

    Raises:
        ValueError: when there are too few tokens for one training and one validation sample.
    """

    def __init__(
        self, tokens: ShardedTokens, context: int, validation: float, key: RngKey,
        tokens_of: Callable[..., Tokens] = Tokens.of, idle: int = 0,
    ):  # fmt: skip
        self.tokens, self.context, self.tokens_of, self.idle = tokens, context, tokens_of, idle
        total = (tokens.tokens - 1) // context
        held_out = max(1, round(total * validation))
        if total - held_out < 1:
            raise ValueError(
                f"{tokens.path} has {tokens.tokens} tokens, too few for a training and a validation sample of "
                f"model.context = {context}; use more text or a smaller context"
            )
        self.training = SampleOrder(total - held_out, key / "training")
        self.validation = SampleOrder(held_out, key / "validation")
        self.held_out = held_out

    def read(self, numbers: np.ndarray, spans: tuple[range, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens at the positions of `spans` of these samples, and those one after them, both (samples, tokens)."""
        parts = [torch.empty(len(numbers), len(span) + 1, dtype=torch.int64) for span in spans]
        for span, part in zip(spans, parts):
            for row, number in zip(part.numpy(), numbers.tolist()):
                self.tokens.read(number * self.context + span.start, len(span) + 1, row)
        nothing = torch.empty(len(numbers), 0, dtype=torch.int64)
        ids, targets = ([nothing, *(part[:, which] for part in parts)] for which in (slice(None, -1), slice(1, None)))
        return torch.cat(ids, 1), torch.cat(targets, 1)

    def training_step(
        self, grid: Grid, number: int, batch: int, schedule: Schedule, device: torch.device, step: int
    ) -> list[Microbatch]:
        """This rank's microbatches of batch `number` (from 0) of the order, of `batch` sequences over all replicas, for
        training step `step` (from 0): the same number, unless batches were left out."""
        order = self.training[number * batch : (number + 1) * batch]
        microbatches = self._microbatches(grid, order, schedule, step, device)
        self._prefetch(grid, self.training[(number + 1) * batch : (number + 2) * batch])
        return microbatches

    def _prefetch(self, grid, order) -> None:
        """Have the system read what this replica's ranks will ask for next, while they train."""
        working = grid.replica.size - self.idle
        if grid.replica.rank < working:
            spans = self.tokens_of(grid, 1, self.context).spans
            for number in order[split(len(order), working, grid.replica.rank)].tolist():
                for span in spans:
                    self.tokens.will_need(number * self.context + span.start, len(span) + 1)

    def validation_batches(
        self, grid: Grid, batch: int, batches: int, schedule: Schedule, device: torch.device
    ) -> list[list[Microbatch]]:
        """This rank's microbatches of up to `batches` validation batches; the same ones at every call."""
        total = min(batches * batch, self.held_out)
        orders = [self.validation[start : min(start + batch, total)] for start in range(0, total, batch)]
        return [self._microbatches(grid, order, schedule, 0, device, total) for order in orders]

    def _microbatches(self, grid, order, schedule, step, device, total=None):
        length, here = self.context, grid.pipeline.rank
        numbers = self.training.samples + order if total is not None else order
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
            tokens = self.tokens_of(grid, part.stop - part.start, length, part.start, step)
            ids = targets = None
            if first or last:
                held, following = self.read(numbers[tokens.first : tokens.first + tokens.sequences], tokens.spans)
                ids = held.reshape(-1).to(device) if first else None
                inner = slice(tokens.inner.start - tokens.first, tokens.inner.stop - tokens.first)
                targets = following[inner].reshape(-1).to(device) if last else None
            microbatches.append(Microbatch(tokens, ids, targets, scale))
        return microbatches
