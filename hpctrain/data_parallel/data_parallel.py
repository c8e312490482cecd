"""Data parallelism: gradients are summed over the data axis in buckets, between nodes while backward still runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from hpctrain import comm
from hpctrain.data_parallel.buckets import (
    BUCKET_BYTES,
    AllReducedGradBucket,
    GradBucket,
    grouped,
    holders_of,
    summed_over,
)
from hpctrain.data_parallel.strategy import DataParallelStrategy
from hpctrain.grad_sync import GradState
from hpctrain.grid import Axis, Grid
from hpctrain.parameter import grad_sync_of, shard_of
from hpctrain.rank_gradient import RankGradient, mark_gradient


class DataParallel(DataParallelStrategy):
    """Completes the gradients of a model's parameters, each of which carries its `Shard`.

    A gradient is a partial sum over the data axis (an expert's over its copies), over the tensor axes on which its
    parameter is replicated and over the pipeline ranks that hold its slice. Buckets are filled in the reverse order of
    the parameters, which is about the order of backward, and reduced in that same order on every rank. On one node they
    lie in shared memory.

    Use: `zero_grad()` before a step; `enable_grad_sync()` before the last backward of the step (earlier ones only
    accumulate), or before the last one of some parameters; `finish_grad_sync()` after it.

    Args:
        parameters: of this rank's stage, in the same order on all ranks of the data axis. Their gradients come to lie
            in the buckets; layers may write them there directly (see `GradSync`).
        grid: the process grid.
        optimizer: for `step`; None where the caller updates.
        bucket_bytes: size at which a bucket is closed.
    """

    buckets: Sequence[GradBucket]

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        grid: Grid,
        optimizer: torch.optim.Optimizer | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ):
        super().__init__(parameters, grid, optimizer)
        groups = grouped(reversed(self.parameters), grid, bucket_bytes)
        self.buckets = [self._bucket(group, summed_over(group[0], grid)) for group in groups]
        self._bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        # Of ht.layers, where code that is not ours computes with gradients: ht.parallelize's know of themselves.
        layers = [p for p in self.parameters if "whole_shape" not in vars(p)]
        self._marked = {p for p in layers if shard_of(p).divided or (optimizer is None and "unmanaged" in vars(p))}
        # Where the sums are elsewhere, what is left here is of this rank's batch alone.
        self._own_gradients = [] if self.uses_grad else [(p, _as_own(grad_sync_of(p).view)) for p in layers]
        self._launched = 0
        self._unused: set[torch.nn.Parameter] = set()  # in the last step
        self._take_parameters()
        if not self.divides:
            self._take_optimizer()

    def _bucket(self, parameters: Sequence[torch.nn.Parameter], plane: Axis | None) -> GradBucket:
        return AllReducedGradBucket(parameters, plane, self.grid.alike(shard_of(parameters[0])))

    def hand_over(self) -> None:
        self._begin()  # where the last backward failed on its way
        super().hand_over()

    def zero_grad(self) -> None:
        super().zero_grad()
        self._unused.clear()
        for parameter in self.parameters:
            grad_sync_of(parameter).begin_step()
        self._begin()  # anew, where the last backward failed on its way

    def _begin(self) -> None:
        for bucket in self.buckets:
            bucket.work.wait()
            bucket.work, bucket.missing = comm.done(), len(bucket.parameters)
        self._launched = 0

    def enable_grad_sync(self, parameters: Iterable[torch.nn.Parameter] | None = None) -> None:
        """The next backward completes these gradients, by default all: start each bucket as soon as it is full."""
        for parameter in self.parameters if parameters is None else parameters:
            grad_sync_of(parameter).enable()

    def _is_unused(self, parameter):
        return parameter in self._unused

    def finish_grad_sync(self) -> None:
        """Wait until every gradient is the sum over all ranks that share its parameter."""
        for parameter in self.parameters:
            grad_sync = grad_sync_of(parameter)
            grad_sync.add_deferred(parameter)  # its layer had no part in the last backward
            if parameter.grad is None:  # nothing was computed from it
                self._unused.add(parameter)
                parameter.grad = grad_sync.view.zero_()
            grad_sync.state = GradState.DONE
        for bucket in self.buckets[self._launched :]:
            bucket.launch()
        self._begin()
        for bucket in sorted(self.buckets, key=holders_of):
            bucket.sum_over_holders(self.grid.pipeline)
        for parameter in self._marked:
            mark_gradient(parameter, summed=True)
        for parameter, gradient in self._own_gradients:
            parameter.grad = gradient
        self._summed = True

    def _arrived(self, parameter) -> None:
        """The hook: a backward has added to the parameter's gradient, or its layer put that off."""
        self._summed = False
        complete = parameter.grad_sync.arrived(parameter)
        if self._optimizer is None and parameter in self._marked:
            mark_gradient(parameter, summed=False)
        if not complete:
            return
        self._bucket_of[parameter].missing -= 1
        # In order, whatever the order of arrival: the other replicas must start the same sums in the same order.
        while self._launched < len(self.buckets) and self.buckets[self._launched].missing == 0:
            self.buckets[self._launched].launch()
            self._launched += 1
        for bucket in self.buckets[: self._launched]:
            bucket.work.test()  # MPI makes little progress by itself


def _as_own(gradient: torch.Tensor) -> torch.Tensor:
    """To be refused by code that is not ours."""
    own = gradient.as_subclass(RankGradient)
    own.summed = False
    return own
