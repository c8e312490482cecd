"""Gathering the weights of a model's layers, each while the layer before it computes."""

from __future__ import annotations

import torch


class Weights:
    """The linear layers of a model in the order in which they compute forward.

    A gathered weight is one more in memory than without `ahead`.
    """

    def __init__(self, ahead: bool):
        self.ahead = ahead
        self._layers: list[torch.nn.Module | None] = []
        self._started = None  # (weight, version of it, work)

    def begin_stage(self) -> None:
        """The layers that follow do not compute right after those before."""
        self._layers.append(None)

    def append(self, layer: torch.nn.Module) -> int:
        """The layer's number."""
        self._layers.append(layer)
        return len(self._layers) - 1

    def gather(self, number: int, weight: torch.Tensor, backward: bool) -> torch.Tensor:
        """The whole of layer `number`'s weight over z, valid until the next but one is gathered.

        The gather of the next layer's weight is started, forward or backward.
        """
        over_z = self._layers[number].product.over_z
        if not self.ahead or over_z.axis.size == 1:
            return over_z.gather(weight)
        whole = self._take(weight)
        if whole is None:
            whole = over_z.gather(weight)
        number += -1 if backward else 1
        layer = self._layers[number] if 0 <= number < len(self._layers) else None
        if layer is not None and (not backward or layer.product.gathers_backward):
            weight = layer.weight
            self._started = weight, weight._version, layer.product.over_z.gather_start(weight.detach())
        return whole

    def _take(self, weight):
        """What was started, if it is this weight; what nobody asked for is dropped."""
        if self._started is None:
            return None
        (started, version, work), self._started = self._started, None
        whole = work.wait()
        return whole if started is weight and version == weight._version else None
