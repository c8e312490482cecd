"""torch's LSTM, GRU and RNN: weights divided, gathered when used; every rank does the work.

To divide it, ranks would have to exchange hidden states after every token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from hpctrain.convert.gathered_weights import Gathered, split_gathered
from hpctrain.convert.sharding import local

if TYPE_CHECKING:
    from hpctrain.convert.plan import Plan


class GatheredRecurrent(Gathered, nn.RNNBase):
    """Mixin for a module that keeps a list of its weights, which it renews when they are others."""

    def forward(self, *args: Any, **kwargs: Any):
        try:
            return super().forward(*args, **kwargs)
        finally:
            with local():
                self._init_flat_weights()  # lets go of the whole ones

    def flatten_parameters(self) -> None:
        """Nothing: cuDNN would lay out this rank's parts by the sizes of the whole. It takes the gathered weights as
        they are, which it copies into one buffer at every call."""


def split_recurrent(plan: Plan, module: nn.Module) -> None:
    split_gathered(plan, module, GatheredRecurrent)
