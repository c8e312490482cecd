"""The input of several layers of a unit, as queries, keys and values are made from one: brought inside once, and
multiplied by all of their weights at once, so that one node of autograd adds up its gradients."""

from __future__ import annotations

from typing import Protocol

import torch

from hpctrain.convert.linear import WeightAndBias, linear, linears
from hpctrain.convert.sharded_activation import enter
from hpctrain.grid import Axis


class EnteringLayer(Protocol):
    axis: Axis

    def matrix_and_bias(self) -> WeightAndBias: ...


class SharedInput:
    """Of `layers`, that bring whole inputs inside and leave what they make divided.

    The first of them that is called with an input multiplies it for those too that took the same one when the unit was
    called before; the first time for all whose weights fit it. A product that nobody takes has no gradient, so that
    gradients do not depend, to the last bit, on what was expected.
    """

    def __init__(self, layers: list[EnteringLayer]):
        self._layers = layers
        self._together: dict[EnteringLayer, list[EnteringLayer]] = {}
        self._inside: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by the id of an input: it, what came inside
        # by the id of what came inside: what was made of it and is not taken yet, and who took something
        self._made: dict[int, dict[EnteringLayer, torch.Tensor]] = {}
        self._taken: dict[int, list[EnteringLayer]] = {}

    def enter(self, x: torch.Tensor, layer: EnteringLayer) -> torch.Tensor:
        if id(x) not in self._inside:
            self._inside[id(x)] = x, enter(x, layer.axis)
        return self._inside[id(x)][1]

    def multiply(self, x: torch.Tensor, layer: EnteringLayer) -> torch.Tensor:
        """What the layer makes of what came inside."""
        if not torch.is_grad_enabled():
            return linear(x, *layer.matrix_and_bias())
        if id(x) not in self._made:
            several = self._several(x, layer)
            made = linears(x, [each.matrix_and_bias() for each in several])
            self._made[id(x)], self._taken[id(x)] = dict(zip(several, made)), []
        self._taken[id(x)].append(layer)
        y = self._made[id(x)].pop(layer, None)
        return linear(x, *layer.matrix_and_bias()) if y is None else y

    def _several(self, x, layer):
        """Those to multiply for at once."""
        several = self._together.get(layer)
        if several is None:
            several = [each for each in self._layers if each.matrix_and_bias()[0].shape[1] == x.shape[-1]]
        return several

    def clear(self) -> None:
        """A call of the unit begins or ends; of one that was broken off nothing is learned."""
        if len({layer for taken in self._taken.values() for layer in taken}) == len(self._layers):
            for taken in self._taken.values():
                self._together.update({layer: [each for each in self._layers if each in taken] for layer in taken})
        for kept in (self._inside, self._made, self._taken):
            kept.clear()
