"""The precisions that weights and gradients have between forward and the optimizer, and the scale of the loss."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from hpctrain.shard import Shard
from hpctrain.shard_entries import Entry

LARGEST, SMALLEST, GROWTH = 2.0**24, 2.0**-10, 1000


@dataclass(frozen=True)
class Precision:
    """Where None, that of the line above; the first is that of the parameters as they are given.

    Attributes:
        compute: of the weights in forward and backward. Where it is not that of the given parameters, these are kept as
            master weights, which the optimizer updates.
        reduce: of the gradients, in which microbatches and replicas are summed. Sums of 16-bit floats over ranks are
            taken in float32 and rounded once.
        comm_dtype: in which gradients travel.
        loss_scale: that of the first step, where `compute` is float16.
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    comm_dtype: torch.dtype | None = None
    loss_scale: float = 2.0**16

    def of(self, given: torch.dtype) -> Precision:
        """Nothing left None, for parameters of this dtype."""
        compute = self.compute or given
        reduce = self.reduce or compute
        return Precision(compute, reduce, self.comm_dtype or reduce, self.loss_scale)


AS_GIVEN = Precision()


class LossScale:
    """What the loss is multiplied by, so that small gradients do not vanish in float16. Steps whose gradient is not
    finite are left out, and halve it; `GROWTH` others in a row double it. At `SMALLEST` it is not the scale by which a
    gradient overflows: such a step is as bad as in any other precision.

    All ranks must be given the same norms.

    Source: Micikevicius et al., "Mixed precision training" (2018), §3.2.
    """

    def __init__(self, scale: float):
        self._scale = torch.tensor(scale, dtype=torch.float64)
        self._good = torch.zeros((), dtype=torch.int64)  # steps since it last changed
        self.overflowed = False  # in the last step

    @property
    def scale(self) -> float:
        return self._scale.item()

    def overflows(self, loss: float, norm: float) -> bool:
        """Whether the step is to be left out."""
        self.overflowed = math.isfinite(loss) and not math.isfinite(norm) and self.scale > SMALLEST
        self._good += 1
        if self.overflowed:
            self._good.zero_()
            self._scale /= 2
        elif self._good == GROWTH:
            self._good.zero_()
            self._scale.mul_(2).clamp_(max=LARGEST)
        return self.overflowed

    def entries(self) -> list[Entry]:
        """For checkpoints."""
        number = Shard((), ())
        return [Entry("loss_scale", number, self._scale), Entry("loss_scale_good_steps", number, self._good)]
