"""Rows with all their features: what each rank of a stage has of a microbatch where experts are chosen and applied."""

from __future__ import annotations

import functools

import torch

from hpctrain import comm
from hpctrain.comm.functional import with_adjoint
from hpctrain.grid import Grid
from hpctrain.layers.context.spans import span_length
from hpctrain.layers.tokens import Tokens
from hpctrain.shard import split_sizes


class WholeRows:
    """The residual layout has features spread over y. Here each rank of y has some of the rows instead, whole: one
    all-to-all there and one back, so that no token is on two ranks and nothing is computed twice.

    Attributes: `tokens`, and `count`, the rows of this rank.
    """

    def __init__(self, grid: Grid, tokens: Tokens):
        self.grid, self.tokens, self._y = grid, tokens, grid.tensor.y
        self._counts = split_sizes(tokens.local_rows, self._y.size)
        self.count = self._counts[self._y.rank]

    def enter(self, x: torch.Tensor, features: int) -> torch.Tensor:
        """From (local rows, features of this rank of y) to (count, features)."""
        if self._y.size == 1:
            return x
        return with_adjoint(x, _to_rows, _to_columns, self._y, self._counts, split_sizes(features, self._y.size))

    def leave(self, x: torch.Tensor, features: int) -> torch.Tensor:
        """The inverse of `enter`, and its adjoint."""
        if self._y.size == 1:
            return x
        return with_adjoint(x, _to_columns, _to_rows, self._y, self._counts, split_sizes(features, self._y.size))

    @functools.cached_property
    def runs(self) -> list[range]:
        """Numbers of the rows through the whole batch of the step."""
        skip, left, found = sum(self._counts[: self._y.rank]), self.count, []
        for run in self.tokens.residual_rows():
            part = run[skip : skip + left]
            skip, left = max(0, skip - len(run)), left - len(part)
            found.append(part)
        return found

    @functools.cached_property
    def numbers(self) -> torch.Tensor:
        """The same, (count,) int64."""
        runs = [torch.arange(run.start, run.stop) for run in self.runs]
        return torch.cat([torch.empty(0, dtype=torch.int64), *runs])

    def sequences(self, device: torch.device | str | None = None) -> torch.Tensor:
        """The sequence of each row, from 0 for the first of the z block, (count,) int64."""
        return (self.numbers // max(1, self.tokens.whole) - self.tokens.first).to(device)

    def check_whole_sequences(self, option: str) -> None:
        """Raise ValueError, on all ranks, where sequences come in parts, of which `option` cannot judge."""
        tokens = self.tokens
        if sum(map(span_length, tokens.over_sequence)) < tokens.whole:
            raise ValueError(
                f"{option} is for whole sequences of {tokens.whole} tokens, got parts of them; use another schedule "
                f"than terapipe, or {option}=0"
            )

    # Ranks that share the sequences of the z block ---------------------------------------------------------------

    def sum_over_sequences(self, counts: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks that have tokens of these sequences; changes `counts`."""
        for axis in (self.grid.plane("x", "y"), self.grid.sequence):
            counts = comm.all_reduce(counts, axis)
        return counts

    def gather_over_sequences(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks that have tokens of these sequences."""
        tokens, plane, sequence = self.tokens, self.grid.plane("x", "y"), self.grid.sequence
        over_y = [split_sizes(each, self._y.size) for each in tokens.rows.sizes]
        rows = comm.all_gather(rows, plane, [count for sizes in over_y for count in sizes])
        return comm.all_gather(rows, sequence, [tokens.sequences * span_length(each) for each in tokens.over_sequence])


def _to_rows(x, y, counts, widths):
    return comm.workspace(y, x).columns_to_rows(x, counts, widths).clone()  # scratch memory


def _to_columns(x, y, counts, widths):
    return comm.workspace(y, x).rows_to_columns(x, counts, widths).clone(memory_format=torch.contiguous_format)
