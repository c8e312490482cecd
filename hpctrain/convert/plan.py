"""What is to become of each module: decided and checked for the whole model before anything is changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from hpctrain.convert.alike_attention import Attentions
from hpctrain.convert.initial import config_around, initial_numbers
from hpctrain.convert.refusals import hook_refused
from hpctrain.convert.replicated_parameter import ReplicatedParameter
from hpctrain.convert.sharded_module import ShardedModule, sharded_type
from hpctrain.convert.sharded_parameter import attach
from hpctrain.convert.sharding import Sharding, hooked
from hpctrain.convert.unit_calls import UnitCalls, counting_type
from hpctrain.grid import Grid
from hpctrain.grid_shape import TENSOR
from hpctrain.layout import Layout, volume
from hpctrain.parameter import annotate
from hpctrain.randomness import RngKey, fill_slice
from hpctrain.shard import Shard, expert_shard, split, split_sizes


class Refused(ValueError):
    """A module that cannot stay, divided or whole; says what would do."""


class Plan:
    """Collects what to do; `apply` does it.

    Attributes:
        axis: the ranks of the tensor axis, x × y × z of them, in one line: whole activations at the border of every
            unit leave little for a box to save, so its ranks divide each weight along one dim, but for `box`.
        replicated: modules that stay whole on every rank.
        sequence: the ranks that share sequences.
        claimed: modules that are dealt with.
        units: those with weights that are divided together, by each call of what divides them.
        roots: {module: type} of those whose forward is another around that of the type.
        spreads: whether experts are spread over ranks.
        kept: those of types that nobody knows, whose own weights stay whole by themselves.
        shards: whether what leaves a unit stays divided, by rows.
        box: whether feed-forward blocks and attention are then divided over x, y and z.
        context_attention: those whose tokens meet those of all of `sequence`.
        attentions: what was found of those that are divided by heads.
    """

    def __init__(self, model: torch.nn.Module, grid: Grid, replicated: set, shards: bool = False):
        self.replicated, self.shards = replicated, shards and grid.tensor.size > 1
        self.box = self.shards and grid.tensor.y.size * grid.tensor.z.size > 1
        self.grid, self.axis, self.data, self.sequence = grid, grid.tensor, grid.data, grid.sequence
        self.model = model
        self.names: dict[int, str] = {}
        self._shared: set[int] = set()
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if self.names.setdefault(id(parameter), name) != name:
                self._shared.add(id(parameter))
        self.paths = {module: path for path, module in model.named_modules()}
        self.context_attention: set[torch.nn.Module] = set()
        self.attentions = Attentions()
        self.roots: dict[torch.nn.Module, type] = {}
        self.kept: list[torch.nn.Module] = []
        self.spreads = False
        self.claimed: set[torch.nn.Module] = set()
        self.units: list[tuple[torch.nn.Module, ...]] = []
        self._noted = 0  # changes that belong to these
        self._shardings: dict[int, Sharding] = {}  # by the identity of parameters, as the two below
        self._places: dict[int, list[tuple[torch.nn.Module, str]]] = {}
        self._draws: dict[int, Callable] = {}
        self._changes: list[tuple[torch.nn.Module, type | None, dict[str, Any]]] = []
        self._unit_calls: dict[torch.nn.Module, tuple[UnitCalls, set[str]]] = {}  # and the methods that it counts

    def parts(self, length: int, unit: int = 1) -> list[slice]:
        """Every rank's range of `length`, balanced, cut at multiples of `unit`."""
        return [split(length, self.axis.size, rank, unit) for rank in range(self.axis.size)]

    def is_shared(self, parameter: torch.Tensor) -> bool:
        """Whether several modules have the parameter."""
        return id(parameter) in self._shared

    def is_free(self, layer: torch.nn.Module) -> bool:
        """Whether its weight is its own, nothing has divided it yet, and it is not to stay whole."""
        shared = self.is_shared(layer.get_parameter("weight"))
        return not (shared or layer in self.claimed or layer in self.replicated)

    def split(
        self, module: torch.nn.Module, name: str, dim: int, parts: list[slice] | None = None, fused: int = 1
    ) -> None:
        """Each rank keeps its one of `parts` of a parameter along `dim`, by default balanced ones.

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
        parts = parts or self.parts(shape[dim])
        slices[dim] = parts[self.axis.rank]
        counts = tuple(part.stop - part.start for part in parts)
        self._keep(module, name, Shard(tuple(shape), tuple(slices)), dim, counts)

    def split_blocks(self, module: torch.nn.Module, name: str, layout: Layout, dim: int) -> None:
        """Each rank keeps its block of a parameter, whose dim `dim` - 1 is two in the layout where matrices are stacked
        along it."""
        if module._parameters[name] is None:
            return
        blocks = self.blocks(layout)
        shard = layout.shard(self.grid.sizes, self.grid.coords)
        self._keep(module, name, shard, dim, tuple(map(volume, blocks)), blocks=blocks)

    def blocks(self, layout: Layout) -> tuple[tuple[slice, ...], ...]:
        """By rank of the tensor axis."""
        places = (self.grid.place_of(rank) for rank in self.grid.members(self.axis.name))
        return tuple(layout.slices(self.grid.sizes, place) for place in places)

    def spread(self, module: torch.nn.Module, name: str) -> None:
        """Each rank of `grid.expert` keeps some of the experts of a parameter, which are its dim 0."""
        self.spreads, shape, axis = True, module.get_parameter(name).shape, self.grid.expert
        counts = split_sizes(shape[0], axis.size)
        self._keep(module, name, expert_shard(tuple(shape), axis.size, axis.rank), 0, counts, axis)

    def whole(self, module: torch.nn.Module) -> None:
        """Every rank keeps the module's own parameters whole, and computes their whole gradients."""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                self.whole_parameter(module, name)
        self.claimed.add(module)

    def whole_parameter(self, module: torch.nn.Module, name: str) -> None:
        """As `whole`, of one."""
        parameter: Any = module._parameters[name]
        self._keep(module, name, replace(Shard.whole(parameter.shape, TENSOR), partial=False))

    def keep(self, module: torch.nn.Module) -> None:
        """Of a module of which nobody knows what it does with its own parameters: they stay whole.

        To be called after all others are divided: what the module shares with one of these is divided, and the whole
        weight when the module reads it.
        """
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if is_lazy(parameter):
                raise ValueError("its weights have no shapes yet; call the model once before parallelize")
            if id(parameter) in self._shardings:
                self._places[id(parameter)].append((module, name))
            else:
                self.whole_parameter(module, name)
        self.claimed.add(module)
        self.kept.append(module)

    def swap_class(self, module: torch.nn.Module, mixin: type, **attributes: Any) -> None:
        """The module is given `mixin`'s methods before its own, and `attributes`. Names, hooks and identity stay."""
        self._changes.append((module, mixin, attributes))
        self.claimed.add(module)

    def change(self, module: torch.nn.Module, **attributes: Any) -> None:
        """Attributes alone."""
        self._changes.append((module, None, attributes))

    def unit_calls(self, module: torch.nn.Module, method: str = "") -> UnitCalls:
        """Those of the module's unit: of its `method`, which `apply` makes count, or else of its forward, which counts
        by itself as a `Unit`."""
        path = self.paths[module] or "the model"
        calls, methods = self._unit_calls.setdefault(module, (UnitCalls(f"{path}.{method}" if method else path), set()))
        methods |= {method} - {""}
        return calls

    def close_unit(self) -> None:
        """What was changed since the last time is one unit."""
        fresh = dict.fromkeys(module for module, _, _ in self._changes[self._noted :])
        self._noted = len(self._changes)
        own = {m: [id(weight) for weight in m._parameters.values() if weight is not None] for m in fresh}
        known = [self._shardings.get(weight) for weights in own.values() for weight in weights]
        if any(sharding is not None and sharding.counts for sharding in known):
            self.units.append(tuple(module for module, weights in own.items() if weights))

    def change_of(self, module: torch.nn.Module) -> tuple[type, dict[str, Any]]:
        """The class that it will have before its own, and its attributes."""
        changes = [(mixin, attributes) for other, mixin, attributes in self._changes if other is module]
        mixin = next(mixin for mixin, _ in changes if mixin is not None)
        return mixin, {name: value for _, attributes in changes for name, value in attributes.items()}

    def has_mixin(self, module: torch.nn.Module, mixin: type) -> bool:
        """Whether its class will have it before its own."""
        return any(issubclass(kind, mixin) for other, kind, _ in self._changes if other is module and kind is not None)

    def share_of(self, parameter: torch.Tensor) -> float:
        """The part of a weight that the rank has which has the most."""
        sharding = self._shardings.get(id(parameter))
        return max(sharding.counts) / sum(sharding.counts) if sharding and sharding.counts else 1.0

    def _keep(self, module, name, shard, dim=0, counts=(), axis=None, blocks=None):
        parameter, axis = module._parameters[name], axis or self.axis
        path, replicas = self.names[id(parameter)], self.grid.alike(shard).size
        self._check(parameter, path, replicas, axis)
        sharding = Sharding(path, axis, shard, dim, counts, tuple(parameter.shape), replicas, self.axis.size, blocks)
        known = self._shardings.setdefault(id(parameter), sharding)
        if known != sharding:
            raise ValueError(
                f"the weight {path!r} is shared by modules that need it divided in different ways;"
                " give each its own, or list all of them in replicate"
            )
        self._places.setdefault(id(parameter), []).append((module, name))
        if parameter.is_meta and id(parameter) not in self._draws:
            config = config_around(self.model, self.paths[module])
            self._draws[id(parameter)] = initial_numbers(module, name, path, config)

    @staticmethod
    def _check(parameter, path, replicas, axis):
        """Hooks and kinds of parameters that a part cannot have."""
        if type(parameter) is not torch.nn.Parameter and not is_lazy(parameter):
            raise ValueError(f"the weight {path!r} is a {type(parameter).__name__}, not a torch.nn.Parameter")
        if replicas > 1 and parameter._backward_hooks:
            raise ValueError(hook_refused(path))
        if replicas * axis.size > 1 and parameter._post_accumulate_grad_hooks:
            raise ValueError(
                f"the weight {path!r} has a hook after its gradient is accumulated, which would see this rank's part;"
                " register it after parallelize if it treats every element by itself"
            )

    def apply(self, key: RngKey | None) -> None:
        """Replace parameters by this rank's slices, one by one, and change the modules.

        Args:
            key: names the initial weights of parameters on the meta device; None where there are none.
        """
        for identity, places in self._places.items():
            module, name = places[0]
            sharding, parameter = self._shardings[identity], module.get_parameter(name)
            if parameter.is_meta:
                data = torch.empty(sharding.shard.shape, dtype=parameter.dtype, device="cpu")
                assert key is not None
                fill_slice(data, sharding.shard, self._draws[identity](key / self.names[identity]))
                made = torch.nn.Parameter(data.view(sharding.local_shape), parameter.requires_grad)
                made.__dict__.update(vars(parameter))
                for module, name in places:
                    module._parameters[name] = made
                parameter = made
            else:
                self._cut(parameter, sharding)
            if sharding.counts and sharding.axis.size > 1:
                attach(parameter, sharding)
            else:
                parameter.__class__ = ReplicatedParameter
                annotate(parameter, shard=sharding.shard, whole_shape=sharding.whole_shape)
        for module, mixin, attributes in self._changes:
            if mixin is not None:
                path = self.paths[module]
                names = (name for name, parameter in module._parameters.items() if parameter is not None)
                sharded_weights = {name: f"{path}.{name}".lstrip(".") for name in names}
                module.__class__ = sharded_type(mixin, type(module), self.roots.get(module))
                assert isinstance(module, ShardedModule)
                module.path, module.sharded_weights = path or "the model itself", sharded_weights
            for name, value in attributes.items():
                setattr(module, name, value)
        for module, (calls, methods) in self._unit_calls.items():
            if methods:
                module.__class__ = counting_type(type(module), methods)
            vars(module)["unit_calls"] = calls

    @staticmethod
    def _cut(parameter, sharding):
        """The parameter stays the same object, so that lists of weights, optimizers and attributes keep their sense."""
        gradient, parameter.grad = parameter.grad, None
        part = sharding.take(parameter.data)
        # Of other bits first: else a graph that is still there would give the weight gradients of the old shape alone.
        parameter.data = part.new_empty(0, dtype=torch.float16 if part.dtype != torch.float16 else torch.float32)
        parameter.data = part
        if gradient is not None:
            parameter.grad = sharding.take(gradient)
        for number, hook in (parameter._backward_hooks or {}).items():
            if sharding.counts and sharding.axis.size > 1:
                parameter._backward_hooks[number] = hooked(hook, sharding)
