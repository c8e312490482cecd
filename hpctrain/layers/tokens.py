"""Tokens: which rows of a microbatch this rank works on."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.layers.algorithm import algorithm_of
from hpctrain.layers.spread import Rows
from hpctrain.shard import split


@dataclass(frozen=True)
class Tokens:
    """The tokens of one microbatch in this rank's z block: `sequences` × `length` rows, sequence by sequence.

    Attributes:
        sequences: whole sequences of the z block (0 is legal).
        length: tokens of a sequence.
        first: number of the block's first sequence within the global batch of the step.
        step: training step, for the dropout masks.
        rows: how the block's rows are spread over x in the residual layout.
        inner: numbers, within the global batch, of the sequences that this rank holds in the inner layout.
        over_z: residual rows of the ranks of z at this rank's x.
    """

    sequences: int
    length: int
    first: int
    step: int
    rows: Rows
    inner: range
    over_z: tuple[int, ...]

    @classmethod
    def of(cls, grid, sequences: int, length: int, first: int = 0, step: int = 0, algorithm="agarwal") -> Tokens:
        """The part of this rank's z block in a microbatch of `sequences` that starts at sequence `first`.

        `algorithm` is that of the layers which the tokens pass through.
        """
        algorithm = algorithm_of(grid, algorithm)
        x, z = grid.tensor.x, grid.tensor.z
        blocks = [split(sequences, z.size, rank) for rank in range(z.size)]
        over = [algorithm.rows_over_x(block.stop - block.start, length) for block in blocks]
        block = blocks[z.rank]
        mine, start = block.stop - block.start, first + block.start
        inner = algorithm.inner_sequences(mine)
        return cls(
            mine, length, start, step, Rows(x, over[z.rank]), range(start + inner.start, start + inner.stop),
            tuple(counts[x.rank] for counts in over),
        )  # fmt: skip

    @property
    def residual_rows(self) -> range:
        """This rank's rows in the residual layout, numbered through the whole batch of the step."""
        before = self.first * self.length + sum(self.rows.counts[: self.rows.axis.rank])
        return range(before, before + self.rows.counts[self.rows.axis.rank])
