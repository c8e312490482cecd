"""The part of the weights that a rank updates, as its optimizer sees it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch

from hpctrain import comm
from hpctrain.data_parallel.clipping import square
from hpctrain.data_parallel.optimizer_state import ParameterSlice
from hpctrain.grid import Axis
from hpctrain.parameter import shard_of
from hpctrain.shard import split_sizes
from hpctrain.shard_entries import Entry


class MasterWeights:
    """This rank's range of a bucket of parameters, whose weights lie side by side in `weights`.

    Attributes: `weights`, the range; `master`, the same in the parameters' first precision, or `weights` itself;
    `pieces`, of the parameters, which hold their part of `master`.

    Args:
        parameters: of one dtype, that of the master weights. Their data become views of `weights`, and are converted to
            its dtype; where that is another one, the range is kept in the first dtype as well.
        weights: flat tensor for all of them, empty yet.
        own: this rank's range of it.
        local: memory for the range beside `weights`, where that is not always there.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        weights: torch.Tensor,
        own: slice,
        local: torch.Tensor | None = None,
    ):
        self.weights = weights[own] if local is None else local
        dtype = parameters[0].dtype
        self.master = self.weights if weights.dtype == dtype else self.weights.new_empty(len(self.weights), dtype=dtype)
        self.pieces: list[ParameterSlice] = []
        self._parts: list[slice] = []  # of the pieces, in the range
        self._places: list[tuple[torch.nn.Parameter, torch.Tensor]] = []  # of the parameters, in `weights`
        first = 0
        for parameter in parameters:
            flat = parameter.detach().reshape(-1)
            start, stop = (min(max(edge - first, 0), len(flat)) for edge in (own.start, own.stop))
            if stop > start:
                part = slice(first + start - own.start, first + stop - own.start)
                self.master[part] = flat[start:stop]
                self._parts.append(part)
                self.pieces.append(ParameterSlice(parameter, start, stop, torch.nn.Parameter(self.master[part])))
            place = weights[first : first + len(flat)].view(parameter.detach().shape)
            parameter.data = place.copy_(parameter.detach())
            self._places.append((parameter, place))
            first += len(flat)
        if local is not None:
            local.copy_(weights[own])

    def hand_over(self, axis: Axis | None) -> None:
        """Leave the parameters to another strategy, whole, in memory that no other rank writes to. Those that are
        trained are in the masters' dtype again; those frozen since stay in the one that the model computes in, to which
        the next strategy would not convert them. What has been given other memory since keeps that.

        Args:
            axis: whose ranks have the other ranges, over which this is collective; None where this rank has all.
        """
        newest, sizes = self._newest(), [place.numel() for _, place in self._places]
        if axis is not None:
            newest = comm.all_gather(newest, axis, split_sizes(sum(sizes), axis.size))
        for (parameter, place), values in zip(self._places, newest.split(sizes)):
            if parameter.detach().is_set_to(place):
                dtype = newest.dtype if parameter.requires_grad else place.dtype
                parameter.data = values.view(place.shape).to(dtype)

    def _newest(self) -> torch.Tensor:
        """The range in the masters' dtype: the masters, but where other code has written to the weights since."""
        if self.master is self.weights:
            return self.master
        as_updated = self.weights == self.master.to(self.weights.dtype)
        return torch.where(as_updated, self.master, self.weights.to(self.master.dtype))

    def square(self, gradient: torch.Tensor, coords: dict[str, int]) -> torch.Tensor:
        """Sum of the squares of the range's gradient where the rank at `coords` counts it, float64."""
        return square([part for piece, part in self.of_pieces(gradient) if shard_of(piece.parameter).owned(coords)])

    def of_pieces(self, gradient: torch.Tensor) -> Iterator[tuple[ParameterSlice, torch.Tensor]]:
        """Each piece, and its part of the range's gradient."""
        return ((piece, gradient[part]) for piece, part in zip(self.pieces, self._parts))

    def set_gradients(self, gradient: torch.Tensor) -> None:
        """Let the optimizer see the range's gradient."""
        for piece, part in self.of_pieces(gradient):
            piece.local.grad = part

    def entries(self, names: dict[torch.nn.Parameter, str]) -> list[Entry]:
        """Of the weights, for checkpoints."""
        return [
            entry
            for piece, part in zip(self.pieces, self._parts)
            for entry in piece.entries(f"model/{names[piece.parameter]}", self.weights[part])
        ]

    def after_step(self) -> None:
        """The optimizer has changed the pieces."""
        for piece in self.pieces:
            piece.local.grad = None
        if self.master is not self.weights:
            self.weights.copy_(self.master)


class ZeroBucket(Protocol):
    """Parameters of which this rank updates a range.

    Attributes: `alike`, the ranks that hold the same parameters; `gradient`, that of the range.
    """

    alike: Axis
    masters: MasterWeights
    gradient: torch.Tensor

    def spread_start(self) -> comm.Work:
        """Begin to give the updated weights to the other ranks."""


B = TypeVar("B", bound=ZeroBucket)


def shard_optimizer(optimizer: torch.optim.Optimizer | None, given: list[ParameterSlice]) -> None:
    """Replace the parameters in the optimizer's groups, and in its state, by this rank's pieces of them; frozen ones
    are left out. The groups' options stay."""
    if optimizer is None:  # the caller updates
        return
    pieces: dict[torch.nn.Parameter, list[ParameterSlice]] = {}
    for piece in given:
        pieces.setdefault(piece.parameter, []).append(piece)
    for group in optimizer.param_groups:
        parameters, group["params"] = group["params"], []
        for parameter in parameters:
            state = optimizer.state.pop(parameter, {})
            for piece in pieces.get(parameter, ()):
                group["params"].append(piece.local)
                if state:
                    optimizer.state[piece.local] = cut_state(state, piece)


def cut_state(state: dict[str, Any], piece: ParameterSlice) -> dict[str, Any]:
    """A piece of what an optimizer keeps for a parameter; its numbers as they are."""

    def cut(key, value):
        is_number = not isinstance(value, torch.Tensor) or (
            value.dim() == 0 and (piece.parameter.dim() > 0 or key == "step")  # by which torch too knows a number
        )
        return value if is_number else value.reshape(-1)[piece.start : piece.stop].clone()

    return {key: cut(key, value) for key, value in state.items()}


def step_by_bucket(optimizer: torch.optim.Optimizer, buckets: Sequence[B], factor: float) -> Iterator[B]:
    """Let the optimizer update the `masters` of each bucket by its `gradient` times `factor`; yields buckets done.

    Gradients in another precision than the weights are converted one bucket at a time, so that no more than one is
    held twice: the optimizer passes over weights without gradients, and what it counts in its groups, such as steps, is
    put back in between.
    """
    converted = any(bucket.gradient.dtype != bucket.masters.master.dtype for bucket in buckets)
    before = _options(optimizer) if converted else []
    for number, together in enumerate([[bucket] for bucket in buckets] if converted else [buckets]):
        for bucket in together:
            gradient = bucket.gradient.to(bucket.masters.master.dtype)
            bucket.masters.set_gradients(gradient if factor == 1 else gradient.mul_(factor))
        if number:
            _put_back(optimizer, before)
        optimizer.step()
        for bucket in together:
            bucket.masters.after_step()
            yield bucket


def _options(optimizer) -> list[dict]:
    """What the optimizer has in its groups beside parameters; copies."""
    return [copy.deepcopy({k: v for k, v in group.items() if k != "params"}) for group in optimizer.param_groups]


@torch.no_grad()
def _put_back(optimizer, options: list[dict]) -> None:
    for group, before in zip(optimizer.param_groups, options):
        for key in group.keys() - before.keys() - {"params"}:
            del group[key]
        for key, value in before.items():
            if isinstance(value, torch.Tensor):  # which others may refer to
                group[key].copy_(value)
            else:
                group[key] = copy.deepcopy(value)
