"""Data parallelism with master weights, or with gradients that travel in fewer bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hpctrain import comm
from hpctrain.data_parallel.zero import ReduceScatteredGradBucket, Zero1
from hpctrain.grid import Axis
from hpctrain.parameter import shard_of


class MixedDataParallel(Zero1):
    """`DataParallel` with a `Precision`: master weights, the optimizer's state and the sums of gradients are on every
    rank. The sums are scattered in `comm_dtype`, taken in float32, and gathered in `comm_dtype`.

    Args: as of `Zero1`.
    """

    shards_state, uses_grad = False, True

    def _bucket(self, parameters: Sequence[torch.nn.Parameter], plane: Axis | None) -> ReduceScatteredGradBucket:
        alike = self.grid.alike(shard_of(parameters[0]))
        return _MixedGradBucket(parameters, plane, alike, self.precision.of(parameters[0].dtype))


class _MixedGradBucket(ReduceScatteredGradBucket):
    """A bucket of whose gradients every rank has all sums, and updates all weights."""

    def _own(self) -> slice:
        return slice(0, len(self._weights.local))

    def launch(self) -> None:
        super().launch()
        self.work = self.work.then(lambda _: self._summands.spread_start(self._comm_dtype).wait())

    def spread_start(self) -> comm.Work:
        return comm.done()
