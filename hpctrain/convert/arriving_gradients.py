"""The gradients that backward leaves on a model's parameters: which are parts, and whether replicas' are summed."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable

import torch

from hpctrain import rank_gradient
from hpctrain.convert.gradients import NOT_SUMMED, PartialGradient
from hpctrain.convert.part import Part
from hpctrain.grid import Grid
from hpctrain.parameter import annotate, on_arrival, shard_of
from hpctrain.rank_gradient import RankGradient, as_tensors


def mark_gradients(model: torch.nn.Module, grid: Grid, complete: Callable[[], None] | None = None) -> None:
    """Make every gradient that backward leaves on the model's parameters a `PartialGradient`, where it is one.

    Costs two microseconds a parameter and backward; nothing on a grid of one rank. The trainers' own hooks take the
    place of these.

    Args:
        complete: a method that averages them over the replicas, when they are needed; where None, whoever needs them
            has to see to it before.
    """
    weak = None if complete is None else weakref.WeakMethod(complete)
    for name, parameter in model.named_parameters():
        sharding = getattr(parameter, "sharding", None)
        part = Part(name, grid, () if sharding is None else (sharding.axis,), weak, sharding)
        summed = grid.alike(shard_of(parameter)).size == 1
        if (part.divided or not summed) and parameter.is_floating_point():
            _mark(parameter, Marker(part, summed))


def mark_copy(copied: torch.nn.Parameter, original: torch.nn.Parameter) -> None:
    """As the original's without a strategy; nobody averages those of a copy."""
    marker = vars(original).get("unmanaged")
    if isinstance(marker, Marker):
        _mark(copied, Marker(dataclasses.replace(marker.part, complete=None), marker.summed))


def _mark(parameter, marker):
    on_arrival(annotate(parameter, unmanaged=marker), marker)


class Marker:
    """Marks a gradient as a part, and whether it is the sum over the replicas as it is."""

    __slots__ = ("part", "summed")

    def __init__(self, part: Part, summed: bool):
        self.part, self.summed = part, summed

    def __call__(self, parameter) -> None:
        with as_tensors():  # not by way of the weight's torch functions, which take longer than all of this
            gradient = parameter.grad
            if type(gradient) is not PartialGradient:
                gradient = parameter.grad = gradient.as_subclass(PartialGradient)
            gradient.part = self.part
        gradient.summed = self.summed


def mark_made(parameter: torch.nn.Parameter) -> None:
    """Its gradient, that no backward left there, as backward's would be."""
    if (marker := vars(parameter).get("unmanaged")) is not None:
        marker(parameter)


# For code of ours, which knows of parts ------------------------------------------------------------------------------


def mark_summed(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Their gradients are the sums over the replicas, until a backward adds to them."""
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, RankGradient):
            gradient.summed = gradient.of_sum = True
        elif gradient is not None:
            vars(gradient)["summed_version"] = gradient._version


def is_summed(gradient: torch.Tensor) -> bool:
    """Whether it was marked, and nothing was added since."""
    if isinstance(gradient, RankGradient):
        return gradient.summed
    return getattr(gradient, "summed_version", None) == gradient._version


def check_summed(parameters: Iterable[torch.nn.Parameter], before: str) -> None:
    """Raises ValueError when the replicas' gradients are not summed `before` something."""
    for parameter in parameters:
        gradient = parameter.grad
        if type(gradient) is PartialGradient and not gradient.summed:
            raise ValueError(NOT_SUMMED.format(before))
        if isinstance(gradient, RankGradient):
            rank_gradient.check_summed(before, gradient)
