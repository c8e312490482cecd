"""Gradients of replicas: their sums, and their means in a loop that does not ask for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hpctrain import comm
from hpctrain.convert.arriving_gradients import is_summed, mark_made, mark_summed
from hpctrain.data_parallel.buckets import sum_gradients, summed_over
from hpctrain.grid import Grid
from hpctrain.parameter import annotate, shard_of
from hpctrain.rank_gradient import RankGradient, as_tensors
from hpctrain.shard import check_shards


def sum_over_replicas(model: torch.nn.Module, grid: Grid) -> bool:
    """Replace every gradient by its sum over the replicas, where it is none yet; whether there were such. Collective.

    Raises:
        ValueError: on every rank, where a backward has added to sums.
    """
    with as_tensors():
        found = _look(model, grid)
        _refuse_mixed(model, found, "call ht.sync_gradients once, after the last backward of a step")
        _sum(found, grid)
        return found.any_unsummed or not found.used


class MeanGradients:
    """Averages the gradients of a model's replicas when they are first needed: clipped, stepped with or computed with.
    Backwards before that are added up; so are those after it, since the mean of equal numbers is that number."""

    divided = False  # every replica has the whole mean

    def __init__(self, model: torch.nn.Module, grid: Grid):
        self._model, self._grid = model, grid
        for parameter in model.parameters():
            annotate(parameter, replicas=self)

    def complete(self, step: bool = False) -> None:
        """Collective. A parameter without a gradient on any rank stays without.

        Args:
            step: nobody has looked yet which parameters have a gradient.

        Raises:
            ValueError: on every rank, for a parameter of a layer that was added since; without `step`, where some
                replicas have no gradient of a parameter, since code that skips those would skip it on some ranks alone.
        """
        check_shards(self._model)
        with as_tensors():
            found = _look(self._model, self._grid)
            if found.uneven and not step:
                raise ValueError(
                    f"the losses of some replicas alone depend on {_names(self._model, found.uneven)}, so that code "
                    "that leaves out those without gradients, as torch.nn.utils.clip_grad_norm_ and GradScaler do, has "
                    "looked at others on each of them: clip by ht.clip_grad_norm_(model, max_norm), or use zero=1 of "
                    "ht.parallelize, which averages as .grad is read"
                )
            replicas = self._grid.replica.size
            if self._grid.data.size > replicas:
                _refuse_mixed(self._model, found, "look at them after the last backward of a step, or use zero=1")
            _sum(found, self._grid, replicas)

    def __deepcopy__(self, memo):
        return None  # a copy is no replica that anybody trains


@dataclass(frozen=True)
class _Found:
    """Of the parameters that have a gradient on any rank: all, those that are to be summed, those without a gradient on
    some rank, and those to whose sums a backward has added. And whether any rank has something to sum, or none could.
    """

    used: list[torch.nn.Parameter]
    unsummed: list[torch.nn.Parameter]
    uneven: list[torch.nn.Parameter]
    mixed: list[torch.nn.Parameter]
    any_unsummed: bool


def _look(model, grid) -> _Found:
    """Collective over those that share a parameter."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    by_axis: dict = {grid.data: [parameter for parameter in parameters if shard_of(parameter).alike == "data"]}
    for parameter in parameters:
        if shard_of(parameter).alike == "copies":
            by_axis.setdefault(grid.copies, []).append(parameter)
        if (plane := summed_over(parameter, grid)) is not None:
            by_axis.setdefault(plane, []).append(parameter)
    flags = {parameter: _flags(parameter.grad) for parameter in parameters}
    unsummed = any(of[1] for of in flags.values())
    for axis in sorted(by_axis, key=lambda axis: axis is grid.data):  # over the data axis last, of what all have told
        sent = [flag for parameter in by_axis[axis] for flag in flags[parameter]]
        *found, unsummed = comm.all_reduce(torch.tensor([*sent, unsummed], dtype=torch.float32), axis, "max").tolist()
        flags.update(zip(by_axis[axis], zip(*(iter(found),) * 4)))
    there = {parameter: of for parameter, of in flags.items() if of[0]}
    return _Found(
        list(there),
        [parameter for parameter, (_, unsummed, absent, _) in there.items() if unsummed or absent],
        [parameter for parameter, (_, _, absent, _) in there.items() if absent],
        [parameter for parameter, (_, unsummed, _, of_sum) in there.items() if unsummed and of_sum],
        bool(unsummed)
        or all(axis.size == 1 for axis, sharing in by_axis.items() if not there.keys().isdisjoint(sharing)),
    )


def _flags(gradient) -> tuple[bool, bool, bool, bool]:
    if gradient is None:
        return False, False, True, False
    return True, not is_summed(gradient), False, isinstance(gradient, RankGradient) and gradient.of_sum


def _refuse_mixed(model, found, instead) -> None:
    if found.mixed:
        raise ValueError(
            f"a backward has added to the gradients of {_names(model, found.mixed)} after they were summed over the "
            f"ranks, and another sum would count what was there once for each rank: {instead}"
        )


def _sum(found, grid, divisor=1) -> None:
    for parameter in found.unsummed:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
            mark_made(parameter)
    sum_gradients(found.unsummed, grid)
    if divisor > 1 and found.unsummed:
        torch._foreach_div_([each.grad for each in found.unsummed if each.grad is not None], divisor)
    mark_summed(found.used)


def _names(model, parameters) -> str:
    """Of the first ones."""
    several = {id(parameter) for parameter in parameters}
    names = [repr(name) for name, parameter in model.named_parameters() if id(parameter) in several]
    return ", ".join(names[:3]) + f" and {len(names) - 3} more" * (len(names) > 3)
