"""Two layers of BERT's kind, of modules that another hands on from one to the other: the feed-forward pair, whose first
is in `intermediate` and whose last in `output`, and the projection back of attention, in `output` as well.

What these compute is seen of tiny twins, and who else is given what lies between, of the source (`handed_on`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hpctrain.convert.box import split_pair
from hpctrain.convert.dropout import FunctionsThatDrop
from hpctrain.convert.handed_on import hands_on
from hpctrain.convert.plain import altered, arguments, children_and_functions, is_hooked, is_plain
from hpctrain.convert.products import pair_pays
from hpctrain.convert.twins import Kept, TwinLinear, with_children

if TYPE_CHECKING:
    from hpctrain.convert.plan import Plan

_HIDDEN, _WIDTH, _FEW = 13, 6, slice(2, 5)  # of a twin: features between and outside, some of its six tokens


def split_intermediate(plan: Plan, module: Any) -> None:
    """`intermediate.dense` and `output.dense`; leaves alone what is no such pair."""
    up, down = (_layer(module._modules.get(name)) for name in ("intermediate", "output"))
    if up is None or down is None or up.out_features != down.in_features:
        return
    if not (plan.is_free(up) and plan.is_free(down) and pair_pays(up, down)):
        return
    method = hands_on(module, "intermediate", "output")
    zeros = _treats_features_alone(module.intermediate) if method and takes_it_alone(module.output) else None
    if zeros is not None:
        between = tuple(each for each in module.intermediate.modules() if each is not up)
        planned = [(module, name, module._modules[name]) for name in ("intermediate", "output")]
        planned += [*children_and_functions(module.intermediate), (module.output, "dense", down)]
        split_pair(plan, up, down, between, planned, plan.unit_calls(module, method))
        plan.change(down, zeros=zeros)


def takes_it_alone(module: nn.Module) -> bool:
    """Whether the first argument of its forward goes into `dense` as it is, and nowhere else."""
    dense = _layer(module)
    if dense is None or len(arguments(module)) not in (1, 2):
        return False
    chance = torch.Generator().manual_seed(0)
    inner = [torch.randn(2, 3, _HIDDEN, generator=chance) for _ in range(2)]
    residual = [torch.randn(2, 3, _WIDTH, generator=chance)] * (len(arguments(module)) - 1)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    kept = Kept()

    def run(x, training):
        children = {**{name: _Same() for name in module._modules}, "dense": _Noting(seen.append)}
        return kept.call(with_children(module, children, training), x, *residual)

    with torch.no_grad():
        try:
            results = [[run(x, training) for x in inner] for training in (False, True)]
        except Exception:  # whatever it does with its layers, it is not this
            return False
    given = [x for x, _ in seen]
    alike = all(isinstance(a, torch.Tensor) and torch.equal(a, b) for a, b in results)
    return alike and kept.are_alike() and len(given) == 4 and all(x is inner[n % 2] for n, x in enumerate(given))


def _layer(module: nn.Module | None) -> nn.Linear | None:
    """Its `dense`, where its other children have no matrices and nobody looks at what it makes."""
    if module is None or altered(module):
        return None
    dense = module._modules.get("dense")
    if dense is None or not is_plain(dense, nn.Linear):
        return None
    weights = [p for name, child in module._modules.items() if name != "dense" and child for p in child.parameters()]
    own = [*module._parameters.values(), *module._buffers.values()]
    if any(p.dim() > 1 for p in weights) or any(each is not None for each in own):
        return None
    return None if any(map(is_hooked, module.modules())) else dense


def _treats_features_alone(module: nn.Module) -> list[tuple[Any, str]] | None:
    """Where it makes each feature, and each token, by itself from what `dense` makes, and draws nothing: the chances of
    functions that would, see `FunctionsThatDrop`; else None."""
    others = {name: child for name, child in module._modules.items() if name != "dense" and child}
    if len(arguments(module)) != 1 or any([*child.parameters()] for child in others.values()):
        return None
    if any(isinstance(each, nn.Dropout) for each in module.modules()):
        return None
    chance = torch.Generator().manual_seed(0)
    weight, bias = (torch.randn(shape, generator=chance, dtype=torch.float64) for shape in ((_HIDDEN, _WIDTH), _HIDDEN))
    x = torch.randn(2, 3, _WIDTH, generator=chance, dtype=torch.float64)
    few, part, kept = x.flatten(0, 1)[None, _FEW], slice(4, 11), Kept()

    def run(x, features, training):
        children = {**copy.deepcopy(others), "dense": TwinLinear(weight[features], bias[features])}
        return kept.call(with_children(module, children, training), x)

    state, functions = torch.get_rng_state(), FunctionsThatDrop(_HIDDEN)
    with torch.no_grad(), functions:
        try:
            for training in (False, True):
                whole = run(x, slice(None), training)
                some = run(x, part, training), run(few, slice(None), training)
                expected = whole[..., part], whole.flatten(0, 1)[None, _FEW]
                if not all(a.shape == b.shape and torch.allclose(a, b, rtol=1e-9) for a, b in zip(some, expected)):
                    return None
                if not torch.equal(torch.get_rng_state(), state):
                    return None
        except Exception:  # whatever it does with its layers, it is not this
            return None
        finally:
            torch.set_rng_state(state)
    return functions.chances(module) if whole.shape == (2, 3, _HIDDEN) and kept.are_alike() else None


class _Noting(nn.Module):
    """In the place of a layer: notes what it is given, and makes the same of everything."""

    def __init__(self, note: Callable):
        super().__init__()
        self.note = note  # no list of its own, which would be what the twin keeps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.ones(*x.shape[:-1], _WIDTH)
        self.note((x, made))
        return made


class _Same(nn.Module):
    """In the place of a norm or a dropout: what is given, as another tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()
