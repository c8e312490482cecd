"""How modules of one's own are divided, where `parallelize` cannot see it: `ht.register_rule`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from hpctrain.convert.dropout import SplitDropout
from hpctrain.convert.plain import is_plain
from hpctrain.convert.products import split_linear
from hpctrain.given import check_types

if TYPE_CHECKING:
    from hpctrain.convert.plan import Plan


@dataclass(frozen=True)
class Split:
    """Linear layers of a module that share features of which each rank has a part.

    Attributes:
        columns: layers that make the features. One of more output features is as many matrices, one after another.
        rows: layers that take them.
        unit: features that stay together, such as those of a head.
        counts: attributes of the module that are the number of units, as its forward reads it: each rank's own.
        dropouts: those that are given the features, along the last dim.
    """

    columns: Sequence[nn.Linear]
    rows: Sequence[nn.Linear]
    unit: int = 1
    counts: Sequence[str] = ()
    dropouts: Sequence[nn.Dropout] = ()


_RULES: dict[type[nn.Module], Callable[[nn.Module], Split]] = {}


def register_rule(kind: type[nn.Module], rule: Callable[[nn.Module], Split]) -> None:
    """Let `ht.parallelize` divide modules of exactly the type `kind` as `rule(module)` says.

    Between `columns` and `rows` the module must treat the features, or units of them, each by itself; nobody checks
    that. What else the module has weights for is refused.

    Raises:
        ValueError: for what is no type of modules, or has a rule already, and a rule that cannot be called.
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise ValueError(f"register_rule: kind must be a type of modules, got {kind!r}")
    check_types(rule=(rule, Callable))
    if kind in _RULES:
        raise ValueError(f"register_rule: {kind.__name__} has a rule already")
    _RULES[kind] = rule


def split_by_rule(plan: Plan, module: nn.Module) -> bool:
    """Whether there was a rule.

    Raises:
        ValueError: where what it gave does not fit the module.
    """
    rule = _RULES.get(type(module))
    if rule is None:
        return False
    how = rule(module)
    _check(module, how)
    features = how.rows[0].in_features
    parts = plan.parts(features, how.unit)
    part = parts[plan.axis.rank]
    for layer in how.columns:
        split_linear(plan, layer, by_output=True, parts=parts, fused=layer.out_features // features, leaves=False)
    for layer in how.rows:
        split_linear(plan, layer, by_output=False, parts=parts, enters=False)
    for dropout in how.dropouts:
        plan.swap_class(dropout, SplitDropout, features=features, part=part)
    plan.change(module, **{name: (part.stop - part.start) // how.unit for name in how.counts})
    return True


def _check(module, how):
    if not isinstance(how, Split):
        raise ValueError(f"its rule must give an hpctrain.convert.Split, got {how!r}")
    layers = [*how.columns, *how.rows]
    if not (how.columns and how.rows and all(is_plain(layer, nn.Linear) for layer in layers)):
        raise ValueError("its rule must name nn.Linear layers as columns and as rows")
    if how.unit < 1:
        raise ValueError(f"its rule must give units of at least 1 feature, got unit={how.unit}")
    features = how.rows[0].in_features
    if any(layer.in_features != features for layer in how.rows):
        raise ValueError(f"its rule names rows that do not all take {features} features")
    if features % how.unit or any(layer.out_features % features for layer in how.columns):
        raise ValueError(
            f"its rule divides {features} features in units of {how.unit}, which do not divide them, or the columns"
        )
    if not all(is_plain(dropout, nn.Dropout) for dropout in how.dropouts):
        raise ValueError("its rule must name nn.Dropout layers as dropouts")
    wrong = [name for name in how.counts if getattr(module, name, None) != features // how.unit]
    if wrong:
        raise ValueError(f"its rule says that {wrong[0]} is {features // how.unit}, the number of units")
    named = {id(parameter) for layer in layers for parameter in layer.parameters()}
    more = [name for name, parameter in module.named_parameters() if id(parameter) not in named]
    if more:
        raise ValueError(f"its rule does not say what becomes of {more[0]}")
