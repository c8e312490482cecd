"""A module whose layers are divided together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from hpctrain.convert.hooks import check_hooks
from hpctrain.convert.unit_calls import UnitCalls

if TYPE_CHECKING:
    from hpctrain.convert.plan import Plan


class Entrances(Protocol):
    """What has come inside of a unit, while it is called."""

    def clear(self) -> None: ...


class Unit(nn.Module):
    """Mixin for a module with layers of `SharedEntry`, of which it has `entered` as well.

    Attributes: `planned`, {name: layer} as they were divided together; `unit_calls`, of it; `named`, the arguments of
    its forward where it takes others besides.

    Raises:
        ValueError: where one of them was exchanged since, as by LoRA, or has a hook: these would meet parts; and for
            arguments of which nobody knows what they do.
    """

    path: str
    planned: dict[str, nn.Module]
    entered: Entrances
    unit_calls: UnitCalls
    named: list[str] | None = None

    def forward(self, *args: Any, **kwargs: Any):
        if self._modules != self.planned:
            raise ValueError(
                f"layers of {self.path}, which ht.parallelize divided together, were exchanged or added to; do it "
                "before parallelize"
            )
        if self.named is not None:
            others = [*args[len(self.named) :], *(value for name, value in kwargs.items() if name not in self.named)]
            if any(each is not None for each in others):
                raise ValueError(
                    f"{self.path} of a parallelized model takes no arguments but {', '.join(self.named)}; list it in "
                    "replicate to leave it whole"
                )
        for module in self.planned.values():
            check_hooks(module, self.path)
        self.entered.clear()
        try:
            with self.unit_calls:
                return super().forward(*args, **kwargs)
        finally:
            self.entered.clear()


def enclose(plan: Plan, module: nn.Module, entered: Entrances, layers: Iterable[nn.Module]) -> None:
    """The module, whose mixin inherits from Unit, is that of these layers, which take or give parts of features."""
    plan.change(module, entered=entered, planned=dict(module._modules))
    for layer in layers:
        plan.change(layer, unit_calls=plan.unit_calls(module))
