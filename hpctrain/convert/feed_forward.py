"""Feed-forward blocks of whatever class: one or two linear layers up, an activation, one down; diffusers' at any depth.

A block is recognised by what it computes. A tiny twin of it, with random numbers in the place of its linear layers, is
run whole, and in two parts that divide the hidden features; where the parts add up to the whole, the features do not
meet each other before the last layer, and ranks can have different ones. A second argument counts once: the residual
that a block adds itself.
"""

from __future__ import annotations

import copy
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hpctrain.convert.box import split_block
from hpctrain.convert.dropout import FunctionsThatDrop, SplitDropout
from hpctrain.convert.plain import (
    altered,
    arguments,
    children_and_functions,
    is_hooked,
    is_of_diffusers,
    is_one_of,
    those_with,
)
from hpctrain.convert.products import SharedEntry, pair_pays, share_entry, split_linear, split_matrix
from hpctrain.convert.twins import Kept, TwinLinear, with_children
from hpctrain.convert.unit_module import Unit

if TYPE_CHECKING:
    from hpctrain.convert.plan import Plan

_LINEARS = nn.Linear, "FalconLinear"
_MOST = 12  # modules within a block
_PARTS = (slice(0, 5), slice(5, 13))  # of the twin's hidden features; no sizes that others are likely to have


def split_feed_forward_block(plan: Plan, module: nn.Module) -> None:
    """Leaves alone what is none."""
    deep = islice(module.named_modules(), 1, _MOST + 2) if is_of_diffusers(module) else module.named_children()
    inner = dict(deep)
    linears = [path for path, child in inner.items() if is_one_of(child, _LINEARS)]
    others = [child for path, child in inner.items() if path not in linears]
    if not 2 <= len(linears) <= 3 or len(inner) > _MOST or not _simple(module, others):
        return
    if any(map(is_hooked, inner.values())):
        return
    if any(plan.is_shared(p) for p in module.parameters()) or not plan.claimed.isdisjoint(inner.values()):
        return
    for down in reversed(linears):
        ups = [path for path in linears if path != down]
        for fused in (1, 2):
            if _fits([inner[path] for path in ups], inner[down], fused):
                found = _divides(module, ups, down, fused)
                if found is not None:
                    _split(plan, module, ups, down, fused, *found)
                    return


def _split(plan, module, ups, down, fused, dropouts, zeros):
    layers, last = [module.get_submodule(path) for path in ups], module.get_submodule(down)
    deeper = [child for child in module.modules() if child not in (module, *module.children(), *layers, last)]
    planned = [each for inner in module.modules() for each in children_and_functions(inner)]
    for layer in layers:
        plan.change(layer, planned=those_with(last, planned))
    plan.change(last, between=tuple(deeper), planned=planned, zeros=zeros, unit_calls=plan.unit_calls(module))
    plan.change(module, named=None if arguments(module) else _arguments(module))
    if plan.box and not dropouts and _treats_rows_alone(module, ups, down, fused):
        split_block(plan, module, layers, last, fused)
        return
    features = last.in_features
    parts = plan.parts(features)
    for layer in layers:
        split_matrix(plan, layer, SharedEntry, 0, 1, by_output=True, parts=parts, fused=fused, leaves=False)
    split_linear(plan, last, by_output=False, parts=parts, enters=False)
    for path in dropouts:
        dropout, calls = module.get_submodule(path), plan.unit_calls(module)
        plan.swap_class(dropout, SplitDropout, features=features, part=parts[plan.axis.rank], unit_calls=calls)
    plan.swap_class(module, Unit)
    share_entry(plan, module, [layers])


def _simple(module, others) -> bool:
    """No weights but those of the linear layers, and a forward of one argument, or of a residual as well."""
    if altered(module) or isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
        return False
    if any(
        value is not None
        for each in (module, *others)
        for value in (*each._parameters.values(), *each._buffers.values())
    ):
        return False
    return len(_arguments(module)) in (1, 2)


def _arguments(module) -> list[str]:
    """Of its forward; where that takes any number of others, the unit refuses them."""
    return arguments(module, others=True)


def _fits(ups, down, fused) -> bool:
    hidden, width = down.in_features, ups[0].in_features
    fit = all(up.in_features == width and up.out_features == fused * hidden for up in ups)
    return fit and pair_pays(ups[0], down)


def _divides(module, ups, down, fused):
    """Where the parts add up, the names of the dropouts that see hidden features, and the chances of functions that do;
    else None."""
    first, last = module.get_submodule(ups[0]), module.get_submodule(down)
    hidden = _PARTS[-1].stop
    if hidden in (first.in_features, last.out_features):  # nobody could tell what a dropout sees
        return None
    chance = torch.Generator().manual_seed(0)

    def numbers(*shape):
        return torch.randn(shape, generator=chance, dtype=torch.float64)

    weights = {name: (numbers(fused, hidden, first.in_features), numbers(fused, hidden)) for name in ups}
    out, bias = numbers(last.out_features, hidden), numbers(last.out_features)
    x, residuals = numbers(2, 3, first.in_features), [numbers(2, 3, last.out_features)] * (len(_arguments(module)) - 1)
    seen: dict[str, set[int]] = {}
    kept = Kept()

    def run(part, training):
        layers = {name: TwinLinear(*(w[:, part].flatten(0, 1) for w in weights[name])) for name in ups}
        layers[down] = TwinLinear(out[:, part], bias * (part.start == 0))
        twin = _twin(module, layers, seen, training)
        return kept.call(twin, x, *(each * (part.start == 0) for each in residuals))

    state, functions = torch.get_rng_state(), FunctionsThatDrop(hidden)
    with torch.no_grad(), functions:
        try:
            parts = [sum(run(part, training) for part in _PARTS) for training in (False, True)]
            seen.clear()
            whole = [run(slice(0, hidden), training) for training in (False, True)]
        except Exception:  # whatever it does with its layers, it is not this
            return None
        finally:
            torch.set_rng_state(state)  # what draws random numbers does not add up
    if not all(isinstance(y, torch.Tensor) and y.shape == (2, 3, last.out_features) for y in (*whole, *parts)):
        return None
    if not all(torch.allclose(a, b, rtol=1e-9, atol=1e-9) for a, b in zip(whole, parts)) or not kept.are_alike():
        return None
    zeros, dropouts = functions.chances(module), [name for name, widths in seen.items() if hidden in widths]
    if zeros is None or any(len(seen[name]) > 1 for name in dropouts):  # one that drops outputs as well
        return None
    return dropouts, zeros


def _treats_rows_alone(module, ups, down, fused) -> bool:
    """Whether the block makes of some tokens, in one row, what it makes of them among others, up to its last layer."""
    width, out = module.get_submodule(ups[0]).in_features, module.get_submodule(down).out_features
    hidden, few = _PARTS[-1].stop, slice(2, 5)
    chance = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(fused * hidden, width, generator=chance, dtype=torch.float64) for name in ups}
    x = torch.randn(2, 3, width, generator=chance, dtype=torch.float64)
    residuals = [x.new_zeros(2, 3, out)] * (len(_arguments(module)) - 1)
    found: list[torch.Tensor] = []
    state = torch.get_rng_state()
    with torch.no_grad():
        try:
            for training in (False, True):
                for rows in (None, few):
                    layers: dict[str, nn.Module] = {name: _RowsOf(weights[name], rows) for name in ups}
                    layers[down] = _Last(out, found)
                    _twin(module, layers, {}, training)(x, *residuals)
        except Exception:  # as it asks for the shape of all
            return False
        finally:
            torch.set_rng_state(state)
    pairs = [(whole.flatten(0, 1)[None, few], alone) for whole, alone in zip(found[::2], found[1::2])]
    return all(a.shape == b.shape and torch.allclose(a, b, rtol=1e-9, atol=1e-9) for a, b in pairs)


class _RowsOf(TwinLinear):
    """Of some tokens, in one row; of all where `rows` is None."""

    def __init__(self, weight: torch.Tensor, rows: slice | None):
        super().__init__(weight, None)
        self.rows = rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if self.rows is None else x.flatten(0, 1)[None, self.rows])


class _Last(TwinLinear):
    """Notes what it is given; gives something of the shape of the whole."""

    def __init__(self, features: int, found: list):
        super().__init__(torch.zeros(features, 1), None)
        self.features, self.found = features, found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.found.append(x)
        return x.new_zeros(2, 3, self.features)


class _Seen(nn.Dropout):
    """Drops nothing, and notes the widths of what it is given."""

    def __init__(self, p: float, name: str, seen: dict):
        super().__init__(p)
        self.name, self.seen = name, seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.setdefault(self.name, set()).add(x.shape[-1])
        return x


def _twin(module, layers, seen, training):
    """The module with other layers, at whatever depth."""
    known: dict[int, Any] = {id(module.get_submodule(path)): layer for path, layer in layers.items()}
    for path, child in module.named_modules():
        if type(child) is nn.Dropout:
            known[id(child)] = _Seen(child.p, path, seen)
    return with_children(module, {n: copy.deepcopy(child, known) for n, child in module.named_children()}, training)
