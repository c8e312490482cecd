"""The load of a model's experts over all ranks, and the biases that follow it."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from hpctrain import comm
from hpctrain.grid import Grid
from hpctrain.layers.experts.router import Router


@dataclass(frozen=True)
class Load:
    """A layer's load in one step, over all ranks.

    Attributes:
        counts: pairs of a token and an expert, for each expert, those that were dropped among them.
        dropped: pairs that were.
        aux_loss, z_loss: as they count in the step's loss.
    """

    counts: tuple[int, ...]
    dropped: int
    aux_loss: float
    z_loss: float


class LoadBalance:
    """Adds up the records of a model's routers, and changes their biases, after each step.

    Args:
        model: this rank's stages. Its creation is collective over the whole grid.

    Attributes: `layers`, the names of all routers, in order and alike on all ranks.
    """

    def __init__(self, model: torch.nn.Module, grid: Grid):
        self._world = grid.world
        self._routers = {name: each for name, each in model.named_modules() if isinstance(each, Router)}
        everyone = comm.all_gather_object({name: each.experts for name, each in self._routers.items()}, grid.world)
        self._experts = {name: count for found in everyone for name, count in found.items()}
        self.layers = sorted(self._experts, key=_natural)
        self._width = 1 + max(self._experts.values(), default=0)

    def clear(self) -> None:
        """Forget the records of a step that is left out."""
        for router in self._routers.values():
            router.record.clear()

    def finish_step(self, loss_scale: float = 1.0, update: bool = True) -> dict[str, Load]:
        """The load of each layer since the last call. With `update`, biases change by it: all ranks by the same sums of
        integers, so that they stay alike to the bit. Collective over the whole grid."""
        if not self.layers:
            return {}
        counts = torch.zeros(len(self.layers), self._width, dtype=torch.int64)
        losses = torch.zeros(len(self.layers), 2, dtype=torch.float64)
        for row, name in enumerate(self.layers):
            if (router := self._routers.get(name)) is not None:
                record = router.record
                counts[row, : router.experts], counts[row, -1] = record.counts[:-1].cpu(), record.counts[-1].cpu()
                losses[row] = record.losses.cpu()
                record.clear()
        counts, losses = comm.all_reduce(counts, self._world), comm.all_reduce(losses, self._world) / loss_scale
        loads = {}
        for name, of_layer, (aux_loss, z_loss) in zip(self.layers, counts, losses.tolist()):
            of_experts = of_layer[: self._experts[name]]
            loads[name] = Load(tuple(of_experts.tolist()), int(of_layer[-1]), aux_loss, z_loss)
            router = self._routers.get(name)
            if update and router is not None and router.balance_bias:
                below = torch.sign(of_experts.sum() - router.experts * of_experts)  # 1 where less than the mean
                assert router.bias is not None
                with torch.no_grad():
                    router.bias.add_(below.to(router.bias), alpha=router.balance_bias)
        return loads


def _natural(name: str) -> list:
    """Block 10 after block 9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
