"""Pairs of linear layers that a module calls one after the other, with an activation between them: the feed-forward
pair that a transformer layer has of its own, next to its attention.

What is between them is seen of the module's source (`handed_on`), and has to treat every feature by itself.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import nn

from hpctrain.convert.box import split_pair
from hpctrain.convert.dropout import SplitDropout, chance_of
from hpctrain.convert.handed_on import bodies, read_elsewhere
from hpctrain.convert.plain import is_plain, is_pointwise
from hpctrain.convert.products import pair_pays
from hpctrain.convert.sources import MethodSource, each_once, is_child, may_count, methods_of

if TYPE_CHECKING:
    from hpctrain.convert.plan import Plan

_CONTAINERS = nn.Sequential, nn.ModuleList, nn.ModuleDict
_STATEMENTS = ast.Assign, ast.AugAssign, ast.Return


def split_own_pairs(plan: Plan, module: nn.Module) -> None:
    """Leaves alone what is no pair. Of a dropout in between each rank draws the mask of its features; a pair that drops
    features is left alone where ranks are a box, and where the dropout stays whole or is used in another place too."""
    if isinstance(module, _CONTAINERS):
        return
    layers = {n: child for n, child in module._modules.items() if child is not None and is_plain(child, nn.Linear)}
    fit = [
        (up, down)
        for up, down in itertools.permutations([name for name, layer in layers.items() if plan.is_free(layer)], 2)
        if layers[up].out_features == layers[down].in_features and pair_pays(layers[up], layers[down])
    ]
    methods = methods_of(module) if fit else ()
    once = {name for name in {*itertools.chain(*fit)} if each_once(methods, name)}
    for up, down in fit:
        free = plan.is_free(layers[up]) and plan.is_free(layers[down])
        if free and once.issuperset((up, down)) and (way := between(module, methods, up, down)) is not None:
            dropouts = [each for each in way.between if isinstance(each, nn.Dropout)]
            divides = not plan.box and all(_is_its_own(plan, module, methods, each) for each in dropouts)
            if not divides and not all(_is_zero(each.p) for each in dropouts):
                continue
            calls, features = plan.unit_calls(module, way.method.name), layers[down].in_features
            planned = [*way.called, *((module, name, layers[name]) for name in (up, down))]
            split_pair(plan, layers[up], layers[down], tuple(way.between), planned, calls)
            part = plan.parts(features)[plan.axis.rank]
            for each in dropouts if divides else ():
                plan.swap_class(each, SplitDropout, features=features, part=part, unit_calls=calls)
            zeros = [*way.zeros, *((each, "p") for each in (() if divides else dropouts))]
            plan.change(layers[down], zeros=tuple(zeros))


def between(module: nn.Module, methods: Sequence[MethodSource], up: str, down: str) -> _Way | None:
    """Of children that are named once: how what `self.up` makes is given to `self.down`, and nobody else, treated
    feature by feature; None where it is not."""
    for method in methods:
        for body in bodies(method.tree):
            for place, statement in enumerate(body):
                if isinstance(statement, _STATEMENTS) and _calls_of(statement, up):
                    way = _Way(module, method, up)
                    return way if way.leads(body[place:], down) and may_count(module, methods, method) else None
    return None


def _is_its_own(plan, module, methods, dropout):
    """Whether the module names a child once, nobody else has it, and it may be divided."""
    if dropout in plan.replicated:
        return False
    names = [name for owner in plan.paths for name, child in owner._modules.items() if child is dropout]
    return len(names) == 1 and module._modules.get(names[0]) is dropout and each_once(methods, names[0])


def _is_zero(p):
    return isinstance(p, (int, float)) and p == 0


def _calls_of(node, child):
    return [each for each in ast.walk(node) if isinstance(each, ast.Call) and is_child(each.func, child)]


class _Way:
    """Of what one layer makes, statement by statement: the modules `between`; what is `called`, an object, the name of
    its attribute and the value; and the `zeros`, an object and the name of its attribute, by which nothing is dropped.
    """

    def __init__(self, module: nn.Module, method: MethodSource, up: str):
        self.module, self.method, self.up = module, method, up
        self.between: list[nn.Module] = []
        self.called: list[tuple[Any, str, Any]] = []
        self.zeros: list[tuple[Any, str]] = []
        self.name, self.names = "", set[str]()
        self.passed: list[ast.Name] = []

    def leads(self, body: list, down: str) -> bool:
        """To the other layer."""
        (call,) = _calls_of(body[0], self.up)
        for number, statement in enumerate(body):
            if not isinstance(statement, _STATEMENTS) or statement.value is None:
                return False
            if ends := _calls_of(statement, down):
                (end,) = ends
                alone = len(end.args) == 1 and not end.keywords and self._is_it(end.args[0])
                others = read_elsewhere(self.method.tree, self.names, self.passed, body[: number + 1], call)
                return alone and not others
            targets = statement.targets if isinstance(statement, ast.Assign) else []
            target = targets[0] if len(targets) == 1 else None
            if not (isinstance(target, ast.Name) and self._is_it(statement.value)):
                return False
            self.name = target.id
            self.names.add(self.name)
        return False

    def _is_it(self, node: ast.expr) -> bool:
        """Whether the value has that layer's features, each treated by itself."""
        if isinstance(node, ast.Name):
            self.passed.append(node)
            return bool(self.name) and node.id == self.name
        if not isinstance(node, ast.Call) or not node.args:
            return False
        return is_child(node.func, self.up) or (self._is_it(node.args[0]) and self._treats_features_alone(node))

    def _treats_features_alone(self, call: ast.Call) -> bool:
        called = self._value(call.func)
        if isinstance(call.func, ast.Attribute) and isinstance(owner := self._value(call.func.value), nn.Module):
            self.called.append((owner, call.func.attr, called))
        if called is F.dropout:
            p, zeros = chance_of(call, self.method, self.module)
            self.zeros += zeros
            return _is_zero(p)
        if isinstance(called, nn.Module):
            self.between.append(called)
        if isinstance(called, nn.Dropout):
            return is_plain(called, nn.Dropout)
        return is_pointwise(called)

    def _value(self, node: ast.expr) -> Any:
        return self.method.value(node, self.module)
