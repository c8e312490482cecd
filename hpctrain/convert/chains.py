"""nn.Sequential: linear layers in pairs, with what lies between them left divided."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from hpctrain.convert.dropout import drop
from hpctrain.convert.hooks import check_global_hooks
from hpctrain.convert.plain import POINTWISE, is_hooked, is_plain
from hpctrain.convert.products import SplitLinear, pair_pays, split_linear

if TYPE_CHECKING:
    from hpctrain.convert.plan import Plan


class Chained(nn.Sequential):
    """Mixin for nn.Sequential. Its modules, called one by one, take and return whole activations nevertheless.

    Attributes:
        planned: those that the sequence had; a slice of it, or one that was changed, runs them one by one.
        divided: {position: (features, this rank's part)} of the modules whose output stays divided.
    """

    planned: tuple[nn.Module, ...] = ()
    divided: dict[int, tuple[int, slice]]

    def forward(self, x: torch.Tensor):
        if any(map(is_hooked, self)) or [id(module) for module in self] != [id(module) for module in self.planned]:
            return super().forward(x)
        for position, module in enumerate(self):
            before, after = self.divided.get(position - 1), self.divided.get(position)
            if isinstance(module, SplitLinear):
                if before is None and module.axis.size > 1:
                    check_global_hooks()
                x = module.run(x, enters=before is None, leaves=after is None)
            elif before and isinstance(module, nn.Dropout):
                x = drop(x, module, *before)
            else:
                x = module(x)
        return x


def split_chain(plan: Plan, module: nn.Sequential) -> None:
    """Find pairs of linear layers."""
    divided: dict[int, tuple[int, slice]] = {}
    first: tuple[int, nn.Linear] | None = None
    between: list[int] = []
    for position, child in enumerate(module):
        if child in plan.replicated:
            first = None
        elif is_plain(child, nn.Linear) and plan.is_free(child):
            if first is not None and pair_pays(first[1], child):
                start, up = first
                split_linear(plan, up, by_output=True)
                split_linear(plan, child, by_output=False)
                part = plan.parts(up.out_features)[plan.axis.rank]
                divided.update(dict.fromkeys((start, *between), (up.out_features, part)))
                plan.close_unit()
                first = None
            else:
                first = position, child
            between = []
        elif type(child) in POINTWISE:
            between.append(position)
        else:
            first = None
    if divided:
        plan.swap_class(module, Chained, divided=divided, planned=tuple(module))
