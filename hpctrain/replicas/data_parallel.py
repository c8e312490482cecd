"""Data parallelism: gradients are summed over the data axis in buckets, between nodes while backward still runs."""

from __future__ import annotations

import functools
import math
from collections import Counter

import torch

from hpctrain import comm
from hpctrain.layers.parameter import GradientPlace
from hpctrain.replicas.method import Method, on_arrival

BUCKET_BYTES = 4 << 20
HOLDERS_TAG = 32766  # above those of the pipeline's messages


class DataParallel(Method):
    """Completes the gradients of a model's parameters, each of which carries its `Shard`.

    A gradient is a partial sum over the data axis, over the tensor axes on which its parameter is replicated and over
    the pipeline ranks that hold its slice. Buckets are filled in the reverse order of the parameters, which is about
    the order of backward, and reduced in that same order on every rank. On one node they lie in shared memory.

    Use: `clear()` before a step; `overlap()` before the last backward of the step (earlier ones only accumulate), or
    before the last one of some parameters; `finish()` after it.

    Args:
        parameters: of this rank's stage, in the same order on all ranks of the data axis. Their gradients come to lie
            in the buckets; layers may write them there directly (see `GradientPlace`).
        grid: the process grid.
        optimizer: for `update`; None where the caller updates.
        bucket_bytes: size at which a bucket is closed.
    """

    def __init__(self, parameters, grid, optimizer=None, bucket_bytes: int = BUCKET_BYTES):
        super().__init__(parameters, grid, optimizer)
        groups = grouped(reversed(self.parameters), grid, bucket_bytes)
        self.buckets = [self._bucket(group, summed_over(group[0], grid)) for group in groups]
        self._bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        self._launched = 0
        self._unused: set[torch.nn.Parameter] = set()  # in the last step
        for parameter in self.parameters:
            on_arrival(parameter, self._arrived)

    def _bucket(self, parameters, plane) -> Bucket:
        return Bucket(parameters, plane, self.grid.data)

    def clear(self) -> None:
        """Forget the gradients of the last step."""
        self._unused.clear()
        for parameter in self.parameters:
            parameter.grad = None
            parameter.place.clear()
        self._begin()  # anew, where the last backward failed on its way

    def _begin(self) -> None:
        for bucket in self.buckets:
            bucket.work.wait()
            bucket.work, bucket.missing = comm.done(), len(bucket.parameters)
        self._launched = 0

    def overlap(self, parameters=None) -> None:
        """The next backward completes these gradients, by default all: start each bucket as soon as it is full."""
        for parameter in self.parameters if parameters is None else parameters:
            parameter.place.last = True

    def _is_unused(self, parameter):
        return parameter in self._unused

    def finish(self) -> None:
        """Wait until every gradient is the sum over all ranks that share its parameter."""
        for parameter in self.parameters:
            self._settle(parameter)  # its layer had no part in the last backward
            if parameter.grad is None:  # nothing was computed from it
                self._unused.add(parameter)
                parameter.grad = parameter.place.view.zero_()
        for bucket in self.buckets[self._launched :]:
            bucket.launch()
        self._begin()
        for bucket in self.buckets:
            bucket.sum_over_holders(self.grid.pipeline)

    def _arrived(self, parameter) -> None:
        place, last = parameter.place.view, parameter.place.last
        if last is None:  # its sum may be under way
            raise RuntimeError(
                f"a gradient of shape {tuple(parameter.shape)} came twice in the last backward of a step, as by "
                "torch.utils.checkpoint(use_reentrant=True) of a module that is used twice; use use_reentrant=False"
            )
        if parameter.grad is None:
            return  # put off, so that this is not the last backward
        if parameter.grad.data_ptr() != place.data_ptr():
            parameter.grad = place.copy_(parameter.grad)
        if not last:
            return
        parameter.place.last = None
        self._settle(parameter)
        self._bucket_of[parameter].missing -= 1
        # In order, whatever the order of arrival: the other replicas must start the same sums in the same order.
        while self._launched < len(self.buckets) and self.buckets[self._launched].missing == 0:
            self.buckets[self._launched].launch()
            self._launched += 1
        for bucket in self.buckets[: self._launched]:
            bucket.work.test()  # MPI makes little progress by itself

    def _settle(self, parameter) -> None:
        """Add what the parameter's layer put off."""
        late = parameter.place.settle()
        if late is not None:
            parameter.grad = parameter.place.view.copy_(late) if parameter.grad is None else parameter.grad.add_(late)


class PartialBucket:
    """Parameters whose gradients lie side by side and are summed together, over the ranks of one replica."""

    def __init__(self, parameters, plane):
        self.parameters, self.plane, self.holders = parameters, plane, parameters[0].shard.holders
        sizes = [p.detach().numel() for p in parameters]
        self.flat = self._room(sum(sizes))
        for parameter, part in zip(parameters, self.flat.split(sizes)):
            parameter.data = parameter.data.contiguous()  # fused optimizers take gradients to lie as their weights do
            parameter.place = GradientPlace(part.view_as(parameter.detach()), part.dtype == parameter.dtype)
        self.missing = len(parameters)
        self.work = comm.done()

    def _room(self, numel):
        return self.parameters[0].new_zeros(numel)

    def launch(self) -> None:
        if self.plane is not None:
            comm.all_reduce(self.flat, self.plane)

    def sum_over_holders(self, pipeline) -> None:
        sum_over_holders(self.flat, self.holders, pipeline)


class Bucket(PartialBucket):
    """The same, summed over the replicas as well."""

    def __init__(self, parameters, plane, data):
        self.data = data
        super().__init__(parameters, plane)

    def _room(self, numel):
        self._summed = comm.Summed(self.data, numel, self.parameters[0])
        return self._summed.mine

    def launch(self) -> None:
        super().launch()
        self.work = self._summed.all_reduce_start()


def sum_over_holders(gradient, holders, pipeline) -> None:
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


def summed_over(parameter, grid):
    """The ranks of the tensor axis over which the parameter's gradient is a partial sum; None where it is whole."""
    if not parameter.shard.partial:
        return None
    axes = [axis for axis in parameter.shard.replicated if grid.shape[axis] > 1]
    return grid.plane(*axes) if axes else None


def grouped(parameters, grid, limit):
    """Groups of parameters with the same dtype, replication (ranks that hold the same must cut it at the same elements)
    and holders, in the order in which they are closed: when
    they reach `limit` bytes.

    The bytes are an even share of the whole parameter's over the tensor axis, not those of this rank: its ranks must
    agree on the groups, since some are summed over them between the collectives of backward.
    """
    open_groups: dict[tuple, list] = {}
    filled: Counter = Counter()
    for parameter in parameters:
        replicated = tuple(axis for axis in parameter.shard.replicated if grid.shape[axis] > 1)
        key = parameter.dtype, replicated, summed_over(parameter, grid), parameter.shard.holders
        open_groups.setdefault(key, []).append(parameter)
        filled[key] += math.prod(parameter.shard.global_shape) * parameter.itemsize // grid.tensor.size
        if filled[key] >= limit:
            filled[key] = 0
            yield open_groups.pop(key)
    yield from open_groups.values()
