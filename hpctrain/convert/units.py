"""What `parallelize` would divide, and what it would not, found without changing anything, for whoever chooses what to
leave whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from hpctrain.convert.attention import SplitMultiheadAttention
from hpctrain.convert.box import BoxLinear, BoxUp
from hpctrain.convert.decide import decide
from hpctrain.convert.divide import chosen_modules
from hpctrain.convert.experts import SplitExperts
from hpctrain.convert.gathered_weights import Gathered
from hpctrain.convert.norms import WholeByRows
from hpctrain.convert.plan import Plan
from hpctrain.convert.products import SplitConv, SplitLinear
from hpctrain.convert.split_heads import SharedHead
from hpctrain.convert.tables import SplitEmbedding
from hpctrain.grid import Grid


class DividedUnit(NamedTuple):
    """Modules that are divided together: a pair of linear layers, attention, or a layer by itself.

    Attributes:
        paths: of those that have weights, as `replicate` takes them: all of them leave the whole unit whole.
        moves: "pair", each rank takes the whole input and gives a summand of the output; "output", one layer of which
            each rank makes some output features, which are gathered; "input", one that takes some features, or rows of
            a table, whose results are summed; "weights", which are gathered for every rank to do the work.
        elements: of its weights, of all ranks.
        share: of them, of the rank that has the most.
        by_output: {path: whether output features are divided, or input features} of its linear layers.
        inside: paths of those whose output stays divided.
        gathered: paths of those whose output is gathered in between, as of key heads that several ranks need.
        on_box: runs on x, y and z.
        parameters: identities of its weights, which others may share.
    """

    paths: tuple[str, ...]
    moves: str
    elements: int
    share: float
    by_output: dict[str, bool]
    inside: frozenset[str]
    gathered: frozenset[str]
    on_box: bool
    parameters: frozenset[int]


class WholeModule(NamedTuple):
    """A module without others in it whose weights stay whole on every rank, as a norm's.

    Attributes:
        elements: of its weights.
        by_rows: goes on with the tokens of a rank where activations are sharded; their gradients are summed.
    """

    elements: int
    by_rows: bool


def divided_and_whole(
    model: nn.Module, grid: Grid, replicate: Sequence[str] = (), shard_activations: bool = False
) -> tuple[list[DividedUnit], dict[str, WholeModule]]:
    """Units of `parallelize` with the same arguments, in the model's order, and what stays whole, by path. No
    communication.

    Raises:
        ValueError: as `parallelize`, for what can be neither divided nor left whole.
    """
    plan = Plan(model, grid, chosen_modules(model, replicate), shard_activations)
    decide(model, plan, None)
    divided = {module for modules in plan.units for module in modules}
    whole = {
        path: WholeModule(elements, plan.has_mixin(module, WholeByRows))
        for path, module in model.named_modules()
        if module not in divided and not module._modules and (elements := sum(p.numel() for p in module.parameters()))
    }
    return [_described(plan, modules) for modules in plan.units], whole


def _described(plan: Plan, modules: tuple[nn.Module, ...]) -> DividedUnit:
    by_output: dict[str, bool] = {}
    gathered, moves, box = set(), "", False
    for module in modules:
        mixin, attributes = plan.change_of(module)
        path = plan.paths[module]
        if issubclass(mixin, SplitLinear):
            by_output[path] = attributes.get("by_output", issubclass(mixin, (BoxUp, SplitConv)))
            box |= issubclass(mixin, BoxLinear)
            if issubclass(mixin, SharedHead):
                gathered.add(path)
            moves = "pair" if moves else "output" if by_output[path] else "input"
        elif issubclass(mixin, (SplitMultiheadAttention, SplitExperts)):
            moves = "pair"
        elif issubclass(mixin, Gathered):
            moves = moves or "weights"
        elif not moves:
            moves = "input" if issubclass(mixin, SplitEmbedding) and attributes["by_row"] else "output"
    inside = [path for path, out in by_output.items() if out and moves == "pair"]
    weights = {id(weight): weight for module in modules for weight in module._parameters.values() if weight is not None}
    return DividedUnit(
        tuple(plan.paths[module] for module in modules), moves, sum(weight.numel() for weight in weights.values()),
        max(map(plan.share_of, weights.values())), by_output, frozenset(inside), frozenset(gathered), box,
        frozenset(weights),
    )  # fmt: skip
