"""Tokens: which rows of a microbatch this rank works on."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpctrain.grid import Grid
from hpctrain.layers.algorithm import algorithm_of
from hpctrain.layers.kv_cache import KVCache
from hpctrain.matmul.sharded_dim import Rows
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
        whole: tokens of a whole sequence, of which `length` begin at `position`.
        kv_cache: what attention keeps of the tokens before `position`; None where these are whole sequences.
    """

    sequences: int
    length: int
    first: int
    step: int
    rows: Rows
    inner: range
    over_z: tuple[int, ...]
    whole: int
    position: int
    kv_cache: KVCache | None
    _given: tuple = field(repr=False, compare=False)  # what these are a part of: grid, sequences, first, algorithm

    @classmethod
    def of(
        cls, grid: Grid, sequences: int, length: int, first: int = 0, step: int = 0, algorithm="agarwal",
        part: slice | None = None, kv_cache: KVCache | None = None,
    ) -> Tokens:  # fmt: skip
        """The part of this rank's z block in a microbatch of `sequences` that starts at sequence `first`.

        `algorithm` is that of the layers which the tokens pass through. With `part`, these tokens of every sequence;
        those before them have passed already, with the same `kv_cache`.
        """
        part = slice(0, length) if part is None else part
        whole, length = length, part.stop - part.start
        algorithm = algorithm_of(grid, algorithm)
        x, z = grid.tensor.x, grid.tensor.z
        blocks = [split(sequences, z.size, rank) for rank in range(z.size)]
        over = [algorithm.rows_over_x(block.stop - block.start, length) for block in blocks]
        block = blocks[z.rank]
        mine, start = block.stop - block.start, first + block.start
        inner = algorithm.inner_sequences(mine)
        return cls(
            mine, length, start, step, Rows(x, over[z.rank]), range(start + inner.start, start + inner.stop),
            tuple(counts[x.rank] for counts in over), whole, part.start, kv_cache, (grid, sequences, first, algorithm),
        )  # fmt: skip

    def part(self, part: slice, kv_cache: KVCache) -> Tokens:
        """These tokens of every sequence."""
        grid, sequences, first, algorithm = self._given
        return Tokens.of(grid, sequences, self.whole, first, self.step, algorithm, part, kv_cache)

    @property
    def local_rows(self) -> int:
        """How many rows this rank has in the residual layout."""
        return self.rows.sizes[self.rows.axis.rank]

    def residual_rows(self) -> list[range]:
        """This rank's rows in the residual layout, numbered through the whole batch of the step, in runs."""
        start = sum(self.rows.sizes[: self.rows.axis.rank])
        stop = start + self.local_rows
        if self.length == self.whole:
            before = self.first * self.length
            return [range(before + start, before + stop)]
        runs = []
        for sequence in range(start // self.length, -(-stop // self.length)):
            before = (self.first + sequence) * self.whole + self.position - sequence * self.length
            first, last = max(start, sequence * self.length), min(stop, (sequence + 1) * self.length)
            runs.append(range(before + first, before + last))
        return runs
