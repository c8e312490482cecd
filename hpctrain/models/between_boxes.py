"""Activations on their way between pipeline stages whose ranks are arranged in different tensor boxes."""

from __future__ import annotations

import itertools

import torch

from hpctrain.comm import Repartition
from hpctrain.comm.functional import with_adjoint
from hpctrain.grid import Grid
from hpctrain.grid_shape import TENSOR
from hpctrain.layers import Tokens
from hpctrain.layers.algorithm import Algorithm
from hpctrain.layout import Slices
from hpctrain.shard import split_sizes


class BetweenBoxes:
    """A message goes from each rank of a stage to the one of the same number in the next, which has the sender's part
    of the rows and features of the residual layout; there ranks exchange what is missing. Gradients go back so.

    Args:
        width: features.
    """

    def __init__(self, grid: Grid, algorithm: Algorithm, width: int):
        self.grid, self.algorithm, self.width = grid, algorithm, width
        self._columns = split_sizes(width, grid.tensor.y.size)[grid.tensor.y.rank]
        self._plans: dict[tuple, Repartition] = {}

    def shape(self, tokens: Tokens, sender: int) -> tuple[int, int]:
        """Of this rank's message from rank `sender` of the pipeline axis."""
        if self._alike(sender):
            return tokens.local_rows, self._columns
        rows, columns = self._parts(tokens, sender)[self.grid.tensor.rank]
        return rows.stop - rows.start, columns.stop - columns.start

    def arrive(self, x: torch.Tensor, tokens: Tokens, sender: int) -> torch.Tensor:
        """What this rank is to have, from what was sent by rank `sender` of the pipeline axis. Differentiable."""
        if self._alike(sender):
            return x
        key = tokens.all_sequences, tokens.length, sender
        if key not in self._plans:
            parts = self._parts(tokens, sender), self._parts(tokens, self.grid.pipeline.rank)
            self._plans[key] = Repartition(self.grid.tensor, *parts)
        plan = self._plans[key]
        return with_adjoint(x, plan.exchange, plan.adjoint)

    def _alike(self, sender: int) -> bool:
        return self.grid.boxes[sender] == self.grid.boxes[self.grid.pipeline.rank]

    def _parts(self, tokens: Tokens, pipeline: int) -> list[Slices]:
        """What each tensor rank of a pipeline rank has."""
        length, box = tokens.length, self.grid.boxes[pipeline]
        layout = self.algorithm.rules.layout(
            {"rows": (tokens.all_sequences * length, max(1, length)), "features": self.width}
        )
        sizes = dict(zip(TENSOR, box))
        return [layout.slices(sizes, dict(zip(TENSOR, place))) for place in itertools.product(*map(range, box))]
