"""The input of several layers of a unit, as queries, keys and values are made from one: brought inside once, and
multiplied by all of their weights at once, so that one node of autograd adds up its gradients."""

from __future__ import annotations

from typing import Protocol

import torch

from hpctrain.convert.boundary_products import entering
from hpctrain.convert.gathering_again import gathering_again
from hpctrain.convert.linear import WeightAndBias, linears
from hpctrain.convert.sharded_activation import enter
from hpctrain.grid import Axis


class EnteringLayer(Protocol):
    """A `SharedEntry` of products.py."""

    axis: Axis

    def matrix_and_bias(self) -> WeightAndBias: ...


class SharedInput:
    """Of layers that bring whole inputs inside and leave what they make divided, in groups that take the same.

    The first of a group that is called with an input multiplies it for the others too. A product that nobody takes has
    no gradient.
    """

    def __init__(self, groups: list[list[EnteringLayer]]):
        self._group = {layer: group for group in groups for layer in group}
        self._groups = sum(map(bool, groups))
        self._inside: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by the id of an input: it, what came inside
        # by the id of an input: it, what was made of it; None once it was taken, as it may be changed in place
        self._made: dict[int, tuple[torch.Tensor, dict[EnteringLayer, torch.Tensor | None]]] = {}

    def multiply(self, x: torch.Tensor, layer: EnteringLayer) -> torch.Tensor:
        """What the layer makes of an input; without gradients it is made for this layer alone."""
        _, made = self._made.setdefault(id(x), (x, {}))
        if layer not in made and torch.is_grad_enabled():
            group = {each: each.matrix_and_bias() for each in self._group[layer]}
            several = {each: of_it for each, of_it in group.items() if of_it[0].shape[1] == x.shape[-1]}
            made.update(zip(several, self._products(x, list(several.values()), layer.axis)))
        y, made[layer] = made.get(layer), None
        return self._products(x, [layer.matrix_and_bias()], layer.axis)[0] if y is None else y

    def _products(self, x, layers, axis):
        if self._groups == 1 and torch.is_grad_enabled():
            return entering(x, layers, axis)
        if id(x) not in self._inside:  # once for all groups and layers
            self._inside[id(x)] = x, enter(x, axis)
        _, inside = self._inside[id(x)]
        with gathering_again(inside):
            return linears(inside, layers)

    def clear(self) -> None:
        self._inside.clear()
        self._made.clear()
