"""Data parallelism with master weights, or with gradients that travel in fewer bits."""

from __future__ import annotations

from hpctrain import comm
from hpctrain.replicas.zero import Whole, Zero1


class MixedDataParallel(Zero1):
    """`DataParallel` with a `Precision`: master weights, the optimizer's state and the sums of gradients are on every
    rank. The sums are scattered in the precision of the wire, taken in float32, and gathered in that of the wire.

    Args: as of `Zero1`.
    """

    spreads = False

    def _bucket(self, parameters, plane):
        return _Everywhere(parameters, plane, self.grid.data, self.precision.of(parameters[0].dtype))


class _Everywhere(Whole):
    def _own(self):
        return slice(0, len(self._weights.mine))

    def launch(self):
        super().launch()
        self.work = self.work.then(lambda _: self._summands.spread_start(self._wire).wait())

    def spread_start(self):
        return comm.done()
