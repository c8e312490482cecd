"""Data parallelism: gradients are summed over the data axis in buckets, while backward still runs."""

from __future__ import annotations

import torch

from hpctrain import comm

BUCKET_BYTES = 8 << 20


class DataParallel:
    """Completes the gradients of a model's parameters, each of which carries its `Shard`.

    A gradient is a partial sum over the data axis, over the tensor axes on which its parameter is replicated and, for
    tied embeddings, over two pipeline stages. Buckets are filled in the reverse order of the parameters, which is about
    the order of backward, and reduced in that same order on every rank.

    Use: `zero()` before a step; `overlap()` before the last backward of the step (earlier ones only accumulate);
    `finish()` after it.

    Args:
        parameters: of this rank's stage, in the same order on all ranks of the data axis. Their `.grad` become views of
            the buckets.
        grid: the process grid.
        bucket_bytes: size at which a bucket is closed.
    """

    def __init__(self, parameters, grid, bucket_bytes: int = BUCKET_BYTES):
        self.grid = grid
        self.parameters = list(parameters)
        self.buckets: list[_Bucket] = []
        for group in _grouped(reversed(self.parameters), bucket_bytes):
            self.buckets.append(_Bucket(group, grid))
        self._bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        self._tied = [p for p in self.parameters if p.shard.stages]
        self._launched = len(self.buckets)
        self._overlapping = False
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self._arrived)

    def zero(self) -> None:
        """Set all gradients to zero."""
        for bucket in self.buckets:
            bucket.flat.zero_()

    def overlap(self) -> None:
        """The next backward completes this rank's gradients: start each bucket as soon as it is full."""
        self._overlapping = True
        self._launched = 0
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)

    def finish(self) -> None:
        """Wait until every gradient is the sum over all ranks that share its parameter."""
        if not self._overlapping:
            self.overlap()
        self._overlapping = False
        for bucket in self.buckets[self._launched :]:
            bucket.launch()
        for bucket in self.buckets:
            bucket.work.wait()
        for parameter in self._tied:
            self._sum_over_stages(parameter)

    def _arrived(self, parameter) -> None:
        if not self._overlapping:
            return
        self._bucket_of[parameter].missing -= 1
        # In order, whatever the order of arrival: the other replicas must start the same sums in the same order.
        while self._launched < len(self.buckets) and self.buckets[self._launched].missing == 0:
            self.buckets[self._launched].launch()
            self._launched += 1
        for bucket in self.buckets[: self._launched]:
            bucket.work.test()  # MPI makes little progress by itself

    def _sum_over_stages(self, parameter) -> None:
        pipeline = self.grid.pipeline
        here, there = sorted(parameter.shard.stages, key=lambda stage: stage != pipeline.rank)
        # 2 s and 2 s + 1 are the tags of the pipeline's messages
        sent = comm.send_start(parameter.grad, pipeline, there, tag=2 * pipeline.size)
        other = comm.recv(torch.empty_like(parameter.grad), pipeline, there, tag=2 * pipeline.size)
        sent.wait()
        parameter.grad.add_(other)


class _Bucket:
    """Parameters whose gradients lie side by side and are summed together."""

    def __init__(self, parameters, grid):
        self.parameters = parameters
        self.data = grid.data
        axes = parameters[0].shard.replicated
        self.plane = grid.plane(*axes) if axes else None
        self.flat = parameters[0].new_zeros(sum(p.numel() for p in parameters))
        for parameter, view in zip(parameters, self.flat.split([p.numel() for p in parameters])):
            parameter.grad = view.view_as(parameter)
        self.missing = 0
        self.work = None

    def launch(self) -> None:
        if self.plane is not None:
            comm.all_reduce(self.flat, self.plane)
        self.work = comm.all_reduce_start(self.flat, self.data)


def _grouped(parameters, limit):
    """Groups of parameters with the same dtype and replication, closed when they exceed `limit` bytes; in the order
    in which they are closed."""
    open_groups: dict[tuple, list] = {}
    for parameter in parameters:
        key = parameter.dtype, parameter.shard.replicated
        group = open_groups.setdefault(key, [])
        group.append(parameter)
        if sum(p.nbytes for p in group) >= limit:
            yield open_groups.pop(key)
    yield from open_groups.values()
