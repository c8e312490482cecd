"""Buckets: parameters whose gradients lie side by side in one tensor, and are summed together."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch

from hpctrain import comm
from hpctrain.grad_sync import GradSync
from hpctrain.grid import Axis, Grid
from hpctrain.parameter import annotate, shard_of

BUCKET_BYTES = 4 << 20
HOLDERS_TAG = 32766  # above those of the pipeline's messages


class GradBucket:
    """A bucket whose gradients are summed over tensor axes.

    Attributes:
        flat: memory of the gradients, one after another.
        missing: how many of them are not complete yet in this step.
        work: the sum that is under way.
        holders: pipeline ranks that hold the same parameters.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], plane: Axis | None):
        self.parameters, self.plane, self.holders = parameters, plane, shard_of(parameters[0]).holders
        sizes = [p.detach().numel() for p in parameters]
        self.flat = self._allocate(sum(sizes))
        for parameter, part in zip(parameters, self.flat.split(sizes)):
            parameter.data = parameter.data.contiguous()  # fused optimizers take gradients to lie as their weights do
            view = part.view_as(parameter.detach())
            annotate(parameter, grad_sync=GradSync(view, direct=part.dtype == parameter.dtype))
        self.missing = len(parameters)
        self.work: comm.Work[torch.Tensor] | comm.Work[None] = comm.done()

    def _allocate(self, numel):
        return self.parameters[0].new_zeros(numel)

    def launch(self) -> None:
        """Begin to sum, all gradients being there."""
        if self.plane is not None:
            comm.all_reduce(self.flat, self.plane)

    def sum_over_holders(self, pipeline: Axis) -> None:
        sum_over_holders(self.flat, self.holders, pipeline)


class AllReducedGradBucket(GradBucket):
    """The same, summed over the ranks that hold the same weights as well: every rank gets all sums."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], plane: Axis | None, alike: Axis):
        self.alike = alike
        super().__init__(parameters, plane)

    def _allocate(self, numel):
        self._sums = comm.AllReduceBuffer(self.alike, numel, self.parameters[0])
        return self._sums.local

    def launch(self) -> None:
        super().launch()
        self.work = self._sums.all_reduce_start()


class OfParameters(Protocol):
    parameters: Sequence[torch.nn.Parameter]


def holders_of(bucket: OfParameters) -> tuple[int, ...]:
    """The pipeline ranks that hold a bucket's parameters. Buckets are summed over them in the order of these: that of
    backward is another on other ranks, as a tied table is the last of the first stage and the first of the last."""
    return shard_of(bucket.parameters[0]).holders


def sum_over_holders(gradient: torch.Tensor, holders: Sequence[int], pipeline: Axis) -> None:
    """Add up what the pipeline ranks have, in the order of the ranks, so that all get the same bits."""
    others = [rank for rank in holders if rank != pipeline.rank]
    if not others:
        return
    sent = [comm.send_start(gradient, pipeline, rank, HOLDERS_TAG) for rank in others]
    parts = {rank: comm.recv(torch.empty_like(gradient), pipeline, rank, HOLDERS_TAG) for rank in others}
    for work in sent:
        work.wait()
    parts[pipeline.rank] = gradient
    *earlier, last = (parts[rank] for rank in holders)
    torch.add(functools.reduce(torch.add, earlier), last, out=gradient)


def summed_over(parameter: torch.nn.Parameter, grid: Grid) -> Axis | None:
    """The ranks of the tensor axis over which the parameter's gradient is a partial sum; None where it is whole."""
    shard = shard_of(parameter)
    if not shard.partial:
        return None
    axes = [axis for axis in shard.replicated if grid.shape[axis] > 1]
    return grid.plane(*axes) if axes else None


def grouped(parameters: Iterable[torch.nn.Parameter], grid: Grid, limit: int) -> Iterator[list[torch.nn.Parameter]]:
    """Groups of parameters for one bucket each, in the order in which they are closed: when they reach `limit` bytes.

    In a group all have the same dtype, the same holders and the same replication: ranks that hold the same parameters
    must cut buckets at the same elements. The bytes are an even share of the whole parameter's over the ranks that
    divide it, not those of this rank: all of a stage must agree on the groups, since some are summed over tensor axes
    between the collectives of backward, and experts' over other ranks than those of the weights around them.
    """
    open_groups: dict[tuple, list[torch.nn.Parameter]] = {}
    filled: Counter = Counter()
    for parameter in parameters:
        shard = shard_of(parameter)
        divided = grid.expert if shard.alike == "copies" else grid.tensor
        replicated = tuple(axis for axis in shard.replicated if grid.shape[axis] > 1)
        key = parameter.dtype, replicated, summed_over(parameter, grid), shard.alike, shard.holders
        open_groups.setdefault(key, []).append(parameter)
        filled[key] += math.prod(shard.global_shape) * parameter.itemsize // divided.size
        if filled[key] >= limit:
            filled[key] = 0
            yield open_groups.pop(key)
    yield from open_groups.values()


def sum_gradients(parameters: Sequence[torch.nn.Parameter], grid: Grid, limit: int = BUCKET_BYTES) -> None:
    """Replace the gradients, all of which are there, by their sums over the ranks that share their parameters, but for
    those of other pipeline stages. The same buckets, summed in the same order, as in `DataParallel`, with memory for
    one of them."""
    for group in grouped(reversed(parameters), grid, limit):
        gradients = [parameter.grad for parameter in group if parameter.grad is not None]  # of all
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        for axis in (summed_over(group[0], grid), grid.alike(shard_of(group[0]))):
            if axis is not None:
                comm.all_reduce(flat, axis)
        for gradient, total in zip(gradients, flat.split([gradient.numel() for gradient in gradients])):
            gradient.copy_(total.view_as(gradient))
