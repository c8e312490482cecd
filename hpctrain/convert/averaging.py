"""Gradients of replicas: their sums, and their means in a loop that does not ask for them."""

from __future__ import annotations

import torch

from hpctrain import comm
from hpctrain.convert.arriving_gradients import is_summed, mark_summed
from hpctrain.data_parallel.buckets import sum_gradients, summed_over
from hpctrain.grid import Grid
from hpctrain.parameter import annotate, shard_of
from hpctrain.rank_gradient import as_tensors
from hpctrain.shard import check_shards


def sum_over_replicas(model: torch.nn.Module, grid: Grid) -> list[torch.nn.Parameter] | None:
    """The parameters that have a gradient on any rank, which is now the sum over the replicas; None where all of them
    are that already. Collective."""
    with as_tensors():
        used, unsummed = _used([parameter for parameter in model.parameters() if parameter.requires_grad], grid)
        if used and not unsummed:
            return None
        sum_gradients(used, grid)
        mark_summed(used)
        return used


class MeanGradients:
    """Averages the gradients of a model's replicas when they are first needed: read, clipped or stepped with. Backwards
    before that are added up. What was averaged before stays as it is, since the mean of equal numbers is that number.
    """

    divided = False  # every replica has the whole mean

    def __init__(self, model: torch.nn.Module, grid: Grid):
        self._model, self._grid = model, grid
        for parameter in model.parameters():
            annotate(parameter, replicas=self)

    def complete(self, step: bool = False) -> None:
        """Collective. A parameter without a gradient on any rank stays without.

        Raises:
            ValueError: on every rank, for one of a layer that was added since.
        """
        check_shards(self._model)
        used = sum_over_replicas(self._model, self._grid)
        if used:
            with as_tensors():
                gradients = [parameter.grad for parameter in used if parameter.grad is not None]  # of all
                torch._foreach_div_(gradients, self._grid.replica.size)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Nothing is left to do."""

    def pause_step(self) -> None:
        """Nothing is to be undone."""

    def after_step(self) -> None:
        """Nothing is left to do."""

    def __deepcopy__(self, memo):
        return None  # a copy is no replica that anybody trains


def _used(parameters, grid) -> tuple[list[torch.nn.Parameter], bool]:
    """The parameters that have a gradient on any rank that shares them; where others have none, it is zero there. And
    whether any of these is no sum over the replicas yet."""
    by_axis: dict = {grid.data: [parameter for parameter in parameters if shard_of(parameter).alike == "data"]}
    for parameter in parameters:
        if shard_of(parameter).alike == "copies":
            by_axis.setdefault(grid.copies, []).append(parameter)
        if (plane := summed_over(parameter, grid)) is not None:
            by_axis.setdefault(plane, []).append(parameter)
    there = {parameter: parameter.grad is not None for parameter in parameters}
    unsummed = any(parameter.grad is not None and not is_summed(parameter.grad) for parameter in parameters)
    for axis in sorted(by_axis, key=lambda axis: axis is grid.data):  # over the data axis last, of what all have told
        flags = torch.tensor([*(there[parameter] for parameter in by_axis[axis]), unsummed], dtype=torch.float32)
        *found, unsummed = comm.all_reduce(flags, axis, "max").tolist()
        there.update(zip(by_axis[axis], map(bool, found)))
    used = [parameter for parameter in parameters if there[parameter]]
    unsummed = bool(unsummed) or all(axis.size == 1 for axis in by_axis)
    for parameter in used if unsummed else ():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return used, unsummed
