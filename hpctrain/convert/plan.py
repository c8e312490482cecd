"""What is to become of each module: decided and checked for the whole model before anything is changed."""

from __future__ import annotations

import torch

from hpctrain.convert.initial import initial_numbers
from hpctrain.grid import TENSOR
from hpctrain.randomness import Key, fill_slice
from hpctrain.shard import Shard, split


class Refused(ValueError):
    """A module that cannot stay, divided or whole; says what would do."""


class Plan:
    """Collects what to do; `carry_out` does it.

    Attributes:
        axis: the ranks of the tensor axis, x × y × z of them, in one line: whole activations at the border of every
            unit leave little for a box to save, so its ranks divide each weight along one dim.
        claimed: modules that are dealt with.
    """

    def __init__(self, model: torch.nn.Module, grid):
        self.axis, self.data, self.config = grid.tensor, grid.data, getattr(model, "config", None)
        self.names: dict[int, str] = {}
        self._shared = set()
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if self.names.setdefault(id(parameter), name) != name:
                self._shared.add(id(parameter))
        self.claimed, self._shards, self._places, self._changes, self._draws = set(), {}, {}, [], {}

    def parts(self, length: int, unit: int = 1) -> list[slice]:
        """Every rank's range of `length`, balanced, cut at multiples of `unit`."""
        return [split(length, self.axis.size, rank, unit) for rank in range(self.axis.size)]

    def is_shared(self, parameter) -> bool:
        """Whether several modules have the parameter."""
        return id(parameter) in self._shared

    def split(self, module, name: str, dim: int, part: slice | None = None, fused: int = 1) -> None:
        """This rank keeps `part` of a parameter along `dim`, by default a balanced one.

        Where `fused` equal matrices are stacked along that dim, it is the same part of each.
        """
        parameter = module._parameters[name]
        if parameter is None:
            return
        shape = list(parameter.shape)
        if fused > 1:
            shape[dim : dim + 1] = fused, shape[dim] // fused
            dim += 1
        slices = [slice(0, length) for length in shape]
        slices[dim] = self.parts(shape[dim])[self.axis.rank] if part is None else part
        self._keep(module, name, Shard(tuple(shape), tuple(slices)))

    def whole(self, module) -> None:
        """Every rank keeps the module's own parameters whole, and computes their whole gradients."""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                slices = tuple(slice(0, length) for length in parameter.shape)
                self._keep(module, name, Shard(tuple(parameter.shape), slices, TENSOR, partial=False))
        self.claimed.add(module)

    def become(self, module, mixin: type, **attributes) -> None:
        """The module is given `mixin`'s methods before its own, and `attributes`. Names, hooks and identity stay."""
        self._changes.append((module, mixin, attributes))
        self.claimed.add(module)

    def change(self, module, **attributes) -> None:
        """Attributes alone."""
        self._changes.append((module, None, attributes))

    def _keep(self, module, name, shard):
        parameter = module._parameters[name]
        known = self._shards.setdefault(id(parameter), shard)
        if known != shard:
            raise ValueError(
                f"the weight {self.names[id(parameter)]!r} is shared by modules that need it divided in different ways;"
                " give each its own, or list all of them in replicate"
            )
        self._places.setdefault(id(parameter), []).append((module, name))
        if parameter.is_meta and id(parameter) not in self._draws:
            self._draws[id(parameter)] = initial_numbers(module, name, self.names[id(parameter)], self.config)

    def carry_out(self, key: Key | None) -> None:
        """Replace parameters by this rank's slices, one by one, and change the modules.

        Args:
            key: names the initial weights of parameters on the meta device; None where there are none.
        """
        for identity, places in self._places.items():
            module, name = places[0]
            shard, original = self._shards[identity], module._parameters[name]
            if original.is_meta:
                data = torch.empty(shard.shape, dtype=original.dtype, device="cpu")
                fill_slice(data, shard, self._draws[identity](key / self.names[identity]))
            else:
                whole = original.detach().reshape(shard.global_shape)
                data = whole[shard.slices].clone(memory_format=torch.contiguous_format)
            if data.dim() > original.dim():  # as many dims as before: optimizers tell weights from biases by that
                dim = next(d for d, length in enumerate(original.shape) if length != shard.global_shape[d])
                data = data.flatten(dim, dim + 1)
            part = torch.nn.Parameter(data, original.requires_grad)
            part.shard, part.whole_shape = shard, tuple(original.shape)
            for module, name in places:
                module._parameters[name] = part
        for module, mixin, attributes in self._changes:
            if mixin is not None:
                base = type(module)
                module.__class__ = type(f"Split{base.__name__}", (mixin, base), {"__module__": __name__})
            for name, value in attributes.items():
                setattr(module, name, value)
