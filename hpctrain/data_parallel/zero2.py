"""ZeRO-2: gradients are spread over the data parallel ranks too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from hpctrain import comm
from hpctrain.comm.workspace import Workspace, new_workspace
from hpctrain.data_parallel.buckets import BUCKET_BYTES, grouped, holders_of, sum_over_holders, summed_over
from hpctrain.data_parallel.master_weights import MasterWeights, shard_optimizer
from hpctrain.data_parallel.precision import AS_GIVEN, Precision
from hpctrain.data_parallel.zero import ZeroStrategy, scaling_of
from hpctrain.grid import Axis, Grid
from hpctrain.parameter import shard_of
from hpctrain.shard import split_sizes


class Zero2(ZeroStrategy):
    """ZeRO-2: as ZeRO-1, with the gradients spread over the data axis as well. They are summed after every backward, a
    bucket at a time, each rank keeping its range of the sums; of the rest no rank holds more than a bucket or two.

    With m microbatches the gradients travel m times, where ZeRO-1 adds the microbatches up first.

    Buckets are summed in rounds: all of them, in one order, each round after a number that says that there is one. What
    a backward reaches, and how many backwards a replica has, decides when a rank starts a sum, never which comes next:
    replicas may differ in both. A bucket that a backward fills in part waits, and all after it, for a later backward or
    for `finish_grad_sync()`; until then their gradients are held whole.

    In a pipeline a backward starts a sum only where the one before is done, and waits for none: the replica that has
    not begun it may be waiting for a stage of its own that waits, in another bucket's sum, for a stage of this replica.

    So a backward whose gradients are given up, by `zero_grad()` without `finish_grad_sync()`, must be one of every
    replica.

    Args: as of `Zero1`.

    Raises:
        ValueError: from backward or `finish_grad_sync()`, when some replicas alone had one.
    """

    buckets: Sequence[ShardedGradBucket]
    _bucket_of: Mapping[torch.nn.Parameter, ShardedGradBucket]

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        grid: Grid,
        optimizer: torch.optim.Optimizer | None,
        bucket_bytes: int = BUCKET_BYTES,
        precision: Precision = AS_GIVEN,
    ):
        super().__init__(parameters, grid, optimizer)
        self.scaling = scaling_of(precision)
        self.buckets = [
            self._bucket(group, summed_over(group[0], grid), precision.of(group[0].dtype))
            for group in self._groups(bucket_bytes)
        ]
        shard_optimizer(optimizer, self._pieces())
        self._take_optimizer()
        # Not the axis's own: under one loss of two models a sum of the other's strategy may be under way.
        workspaces: dict[tuple[Axis, bool], Workspace] = {}
        for bucket in self.buckets:
            place = bucket.alike, bucket.gradient.is_cpu
            bucket.workspace = workspaces.setdefault(place, new_workspace(bucket.alike, bucket.gradient))
        self._bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        if grid.pipeline.size > 1:
            for alike in (grid.data, grid.copies):
                over = [bucket for bucket in self.buckets if bucket.alike is alike]
                if over:
                    max(over, key=lambda bucket: bucket.nbytes).reserve()
        self._turn = 0  # of the buckets, in a round
        # Whether any rank has another round, and the most and, negative, the fewest steps that a rank has given up.
        self._round = comm.done(torch.zeros(3, dtype=torch.int64))
        self._given_up = 0  # steps of which sums were begun
        self._summing: ShardedGradBucket | None = None  # the bucket whose sum is under way
        self._take_parameters()

    def _groups(self, bucket_bytes: int) -> Iterator[list[torch.nn.Parameter]]:
        return grouped(reversed(self.parameters), self.grid, bucket_bytes)

    def _bucket(
        self, parameters: Sequence[torch.nn.Parameter], plane: Axis | None, precision: Precision
    ) -> ShardedGradBucket:
        return ShardedGradBucket(parameters, plane, self.grid.alike(shard_of(parameters[0])), precision)

    def hand_over(self) -> None:
        self._settle()  # where the last backward failed on its way
        self._round.wait()
        super().hand_over()

    def zero_grad(self) -> None:
        if not self._summed and self.buckets[0].launches:
            self._given_up += 1
        super().zero_grad()
        self._turn = 0  # anew, where the last backward failed on its way
        for bucket in self.buckets:
            bucket.clear()

    def finish_grad_sync(self) -> None:
        while self._turn:
            self._launch_next()
        while self.buckets and self._another_round():
            for bucket in self.buckets:
                self._launch(bucket)
        self._settle()
        for bucket in sorted(self.buckets, key=holders_of):
            if not bucket.launches:
                bucket.gradient.zero_()
            sum_over_holders(bucket.gradient, holders_of(bucket), self.grid.pipeline)
        self._summed = True

    def _is_unused(self, parameter):
        return not self._bucket_of[parameter].arrived[parameter]

    def _arrived(self, parameter) -> None:
        self._summed = False
        self._bucket_of[parameter].arrived[parameter] += 1
        self._advance()
        if self._summing is not None:
            self._summing.work.test()  # MPI makes little progress by itself

    def _advance(self) -> None:
        """Start the sums of what is there."""
        while self.buckets[self._turn].full() and self._need_not_wait():
            self._launch_next()

    def _need_not_wait(self) -> bool:
        """Whether another sum can be started at once, as far as this matters; alike on the ranks of the tensor axis,
        which complete gradients over that axis first."""
        if self.grid.pipeline.size == 1:
            return True
        before: list[comm.Work] = [] if self._summing is None else [self._summing.work]
        if self._turn == 0:  # a rank without elements of a bucket's sums receives nothing, and would run ahead
            before.append(self._round)
        is_done = all([work.test() for work in before])
        return all(self.grid.tensor.comm.allgather(is_done))  # how often depends on the time, so it is in no ledger

    def _another_round(self) -> bool:
        """Whether any rank has gradients left that were not summed."""
        self._begin_round(any(p.grad is not None for p in self.parameters))
        return bool(self._end_round())

    def _begin_round(self, mine: bool) -> None:
        self._end_round()
        # By MPI, whatever takes the sums of the axis: a rank that waits in a bucket's sum must let this one go on.
        self._round = comm.all_reduce_start(
            torch.tensor([mine, self._given_up, -self._given_up]), self.grid.data, "max"
        )

    def _end_round(self) -> int:
        """Whether any rank has another."""
        more, most, fewest = self._round.wait().tolist()
        if most != -fewest:
            raise ValueError(
                f"{type(self).__name__} sums gradients as backward goes, and zero_grad() gave up those of a backward "
                "that other replicas did not have: freeze weights whose gradients are not wanted, have all replicas "
                "call backward, its loss times 0 where there is no batch, or finish_grad_sync() before zero_grad()"
            )
        return more

    def _launch_next(self) -> None:
        if self._turn == 0:
            self._begin_round(True)
        self._launch(self.buckets[self._turn])
        self._turn = (self._turn + 1) % len(self.buckets)

    def _launch(self, bucket: ShardedGradBucket) -> None:
        self._settle()
        bucket.launch()
        self._summing = bucket

    def _settle(self) -> None:
        if self._summing is not None:
            self._summing.add()
            self._summing = None


class ShardedGradBucket:
    """A bucket of whose gradients a rank keeps its range.

    Attributes:
        arrived: how often each parameter's gradient has come in this step.
        launches: how often the bucket was summed.
        gradient: this rank's range of the sums.
        workspace: where they are taken, of all buckets of a strategy with the same ranks.
    """

    workspace: Workspace

    def __init__(self, parameters: Sequence[torch.nn.Parameter], plane: Axis | None, alike: Axis, precision: Precision):
        self.parameters, self.plane, self.alike = parameters, plane, alike
        self._sizes = [p.detach().numel() for p in parameters]
        self._counts = split_sizes(sum(self._sizes), alike.size)
        self.masters = self._make_masters(precision.compute)
        self.gradient = self.masters.weights.new_zeros(len(self.masters.weights), dtype=precision.reduce)
        self._summand = self.gradient.new_empty(0, dtype=precision.comm_dtype)
        self.work = comm.done(self.gradient)
        self.clear()

    def _make_masters(self, dtype: torch.dtype | None) -> MasterWeights:
        """And memory for the weights."""
        self._replicated = comm.ReplicatedBuffer(self.alike, sum(self._sizes), self.parameters[0], dtype)
        return MasterWeights(self.parameters, self._replicated.local, self._replicated.own)

    def clear(self) -> None:
        self.arrived: Counter = Counter()
        self.launches = 0

    def full(self) -> bool:
        return min(self.arrived[p] for p in self.parameters) > self.launches

    @property
    def nbytes(self) -> int:
        """Of what is summed."""
        return sum(self._sizes) * self._summand.itemsize

    def reserve(self) -> None:
        """Make the memory for sums of this size, on which the replicas agree. Collective over them."""
        self.workspace.reserve(sum(self._sizes), self._summand)

    def launch(self) -> None:
        """Begin to sum what has come."""
        summands = self.workspace.buffer(sum(self._sizes), self._summand)
        for parameter, part in zip(self.parameters, summands.split(self._sizes)):
            if parameter.grad is None:
                part.zero_()
            else:
                part.view(parameter.grad.shape).copy_(parameter.grad)
                parameter.grad = None
        if self.plane is not None:
            comm.all_reduce(summands, self.plane)
        self.work = self.workspace.reduce_start(summands, self._counts, self.gradient.dtype)
        self.launches += 1

    def add(self) -> None:
        """Wait for the sum, and add it to this step's."""
        part, self.work = self.work.wait(), comm.done(self.gradient)
        if self.launches > 1:
            self.gradient += part
        else:
            self.gradient.copy_(part)

    def spread_start(self) -> comm.Work:
        """Begin to give the updated weights to the other ranks."""
        return self._replicated.spread_start()
