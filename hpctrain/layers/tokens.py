"""Tokens: which rows of a microbatch this rank works on."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.layers.spread import Rows
from hpctrain.shard import split, split_sizes


@dataclass(frozen=True)
class Tokens:
    """The tokens of one microbatch in this rank's z block: `sequences` × `length` rows, sequence by sequence.

    Attributes:
        sequences: whole sequences of the z block (0 is legal).
        length: tokens of a sequence.
        first: number of the block's first sequence within the global batch of the step.
        step: training step, for the dropout masks.
        rows: how the block's rows are spread over x in the residual layout.
    """

    sequences: int
    length: int
    first: int
    step: int
    rows: Rows

    @classmethod
    def of(cls, grid, sequences: int, length: int, first: int = 0, step: int = 0) -> Tokens:
        """The part of this rank's z block in a microbatch of `sequences` that starts at sequence `first`."""
        z = grid.tensor.z
        part = split(sequences, z.size, z.rank)
        mine = part.stop - part.start
        rows = Rows(grid.tensor.x, split_sizes(mine * length, grid.tensor.x.size))
        return cls(mine, length, first + part.start, step, rows)

    @property
    def residual_rows(self) -> range:
        """This rank's rows in the residual layout, numbered through the whole batch of the step."""
        before = self.first * self.length + sum(self.rows.counts[: self.rows.axis.rank])
        return range(before, before + self.rows.counts[self.rows.axis.rank])
