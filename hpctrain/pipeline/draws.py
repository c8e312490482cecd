"""Random numbers that depend on the grid: found in the first training step, before an update that is the caller's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from hpctrain import comm
from hpctrain.randomness import generator_states

if TYPE_CHECKING:
    from mpi4py import MPI


class DrawCheck:
    """Watches the stages of a model for what they draw from torch's, numpy's or Python's generators in training.

    Args:
        world: the communicator (mpi4py) of all ranks of the grid.
    """

    def __init__(self, world: MPI.Intracomm):
        self._world, self._done = world, False
        self._drawing: dict[int, str] = {}  # stages, and the generators from which they drew

    def call(self, stage: int, training: bool, function: Callable, *arguments: Any):
        """`function(*arguments)`, watched until `check` has been called."""
        if self._done or not training:
            return function(*arguments)
        before = generator_states()
        y = function(*arguments)
        if drawn := [name for name, state in generator_states().items() if state != before.get(name)]:
            self._drawing[stage] = drawn[0]
        return y

    def check(self) -> None:
        """After the first step, before an update that is the caller's: refuse stages that drew numbers which depend on
        the grid.

        Raises:
            ValueError: on every rank. Collective the first time, and nothing later.
        """
        if self._done:
            return
        with comm.together(self._world):
            for stage, generator in self._drawing.items():
                raise ValueError(
                    f"stage {stage} draws random numbers from the generator of {generator} in training, as F.dropout "
                    "and StochasticDepth do, which would be others on another grid; leave it out, or draw in the stage "
                    "by hpctrain.RngKey, as hpctrain.layers.Dropout does"
                )
        self._done = True


def refuse_dropout(what: str, module: torch.nn.Module) -> None:
    """Raise ValueError for a module of torch whose masks depend on the grid; `what` names the module given."""
    for each in module.modules():
        if isinstance(each, torch.nn.modules.dropout._DropoutNd) and each.p:
            raise ValueError(
                f"{what} has a {type(each).__name__} of torch, whose masks depend on the grid; set p=0, or draw masks "
                "in it by hpctrain.RngKey, as hpctrain.layers.Dropout does"
            )
