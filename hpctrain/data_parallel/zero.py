"""ZeRO: what data parallel ranks hold alike is spread over them.

Source: Rajbhandari, Rasley, Ruwase and He, "ZeRO: memory optimizations toward training trillion parameter models"
(2020), §5.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from hpctrain import comm
from hpctrain.data_parallel import optimizer_state
from hpctrain.data_parallel.buckets import BUCKET_BYTES, GradBucket, sum_over_holders
from hpctrain.data_parallel.clipping import clipping_factor, replica_totals
from hpctrain.data_parallel.data_parallel import DataParallel
from hpctrain.data_parallel.master_weights import MasterWeights, ZeroBucket, shard_optimizer, step_by_bucket
from hpctrain.data_parallel.optimizer_state import ParameterSlice
from hpctrain.data_parallel.precision import AS_GIVEN, LossScale, Precision
from hpctrain.data_parallel.strategy import DataParallelStrategy
from hpctrain.grid import Axis, Grid
from hpctrain.parameter import annotate, shard_of
from hpctrain.shard_entries import Described, Entry


class ZeroStrategy(DataParallelStrategy):
    """What the three stages have in common: each rank updates its range of every bucket."""

    buckets: Sequence[ZeroBucket]
    shards_state = True  # each rank has the master weights and the optimizer's state of its range, otherwise of all
    uses_grad, divides = False, True
    scaling: LossScale | None = None
    _scaled = 1.0

    @property
    def loss_scale(self) -> float:
        return self.scaling.scale if self.scaling else 1.0

    def overflows(self, loss: float, norm: float) -> bool:
        return self.scaling is not None and self.scaling.overflows(loss, norm)

    def report(self) -> dict:
        if self.scaling is None:
            return {}
        skipped = {"skipped": "the gradient overflows in fp16"} if self.scaling.overflowed else {}
        return {"loss_scale": self.loss_scale, **skipped}

    def loss_and_grad_norm(self, loss: torch.Tensor) -> tuple[float, float]:
        squares = torch.zeros(2, dtype=torch.float64)
        for bucket in self.buckets:
            # The ranks of a stage count ranges of their own, or, where each has all, experts' apart from the rest.
            apart = bucket.alike is self.grid.copies and not self.shards_state
            squares[int(apart)] += bucket.masters.square(bucket.gradient, self.grid.coords)
        totals = replica_totals(loss, squares, self.grid)
        comm.all_reduce(totals if self.shards_state else totals[:1], self.grid.data)
        total, square = totals.tolist()
        self._scaled = self.loss_scale  # which may change before the update
        return total / self._scaled, square**0.5 / self._scaled

    def step(self, norm: float, max_norm: float) -> None:
        if self._stepped:
            raise RuntimeError(
                f"{type(self).__name__}.step() was called twice without strategy.zero_grad() in between: the gradient "
                "of the last step would be added to this one's; call it before backward, beside or instead of "
                "optimizer.zero_grad(), which knows of this rank's ranges of the weights alone"
            )
        self._stepped = True
        self._check_step()
        factor = (clipping_factor(norm, max_norm) if max_norm else 1.0) / self._scaled
        begun = [bucket.spread_start() for bucket in step_by_bucket(self.optimizer, self.buckets, factor)]
        for work in begun:
            work.wait()

    def weights_changed(self) -> None:
        for bucket in self.buckets:
            bucket.masters.after_step()
        for work in [bucket.spread_start() for bucket in self.buckets]:
            work.wait()

    def hand_over(self) -> None:
        super().hand_over()
        for bucket in self.buckets:
            bucket.masters.hand_over(bucket.alike if self.shards_state else None)

    def to_save(self, names: dict[torch.nn.Parameter, str]) -> list[Entry]:
        pieces = [p for p in self._pieces() if self.shards_state or self.grid.alike(shard_of(p.parameter)).rank == 0]
        scale = self.scaling.entries() if self.scaling and self.grid.rank == 0 else []
        trained, frozen = self._divided(names)
        entries = optimizer_state.pieces_to_save(trained, pieces, self.optimizer, self.grid, weights=True)
        return entries + optimizer_state.parameters_to_save(frozen, self.grid) + scale

    def to_load(self, names: dict[torch.nn.Parameter, str], saved: dict[str, Described]) -> list[Entry]:
        trained, frozen = self._divided(names)
        entries = optimizer_state.pieces_to_load(trained, self._pieces(), self.optimizer, saved, weights=True)
        entries += optimizer_state.parameters_to_load(frozen, saved)
        if self.scaling:
            entries += [entry for entry in self.scaling.entries() if entry.name in saved]
        return entries + self._weights_to_load(trained)

    def _weights_to_load(self, names: dict[torch.nn.Parameter, str]) -> list[Entry]:
        """What the model computes with: of every rank, and rounded where the masters are in another precision."""
        return [Entry(f"model/{name}", shard_of(p), p.detach()) for p, name in names.items()]

    def _pieces(self) -> list[ParameterSlice]:
        return [piece for bucket in self.buckets for piece in bucket.masters.pieces]


class Zero1(ZeroStrategy, DataParallel):
    """ZeRO-1: the optimizer's state, and with it the master weights where the model computes in fewer bits, are spread
    over the data axis, and over the copies of an expert. Each rank updates its range of every bucket, and gives the
    weights to the others.

    Gradients are treated as by `DataParallel`, but every rank receives its range of their sums only. In bytes this is
    the same: half of an all-reduce for the gradients, the other half for the weights.

    Args:
        parameters, grid, bucket_bytes: as of `DataParallel`.
        optimizer: any torch optimizer over the parameters that treats every element by itself. Its groups are
            given this rank's pieces of the parameters; their options stay. None where the caller updates.
        precision: of the weights and gradients.
    """

    buckets: Sequence[ReduceScatteredGradBucket]

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        grid: Grid,
        optimizer: torch.optim.Optimizer | None,
        bucket_bytes: int = BUCKET_BYTES,
        precision: Precision = AS_GIVEN,
    ):
        self.precision, self.scaling = precision, scaling_of(precision)
        super().__init__(parameters, grid, optimizer, bucket_bytes)
        shard_optimizer(optimizer, self._pieces())
        self._take_optimizer()

    def hand_over(self) -> None:
        super().hand_over()
        for bucket in self.buckets:
            if bucket.sets_grad_dtype:
                for parameter in bucket.parameters:
                    annotate(parameter, grad_dtype=None)

    def _bucket(self, parameters: Sequence[torch.nn.Parameter], plane: Axis | None) -> ReduceScatteredGradBucket:
        alike = self.grid.alike(shard_of(parameters[0]))
        return ReduceScatteredGradBucket(parameters, plane, alike, self.precision.of(parameters[0].dtype))


class ReduceScatteredGradBucket(GradBucket):
    """A bucket of whose gradients every rank has its own summands, and the sums of its range."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], plane: Axis | None, alike: Axis, precision: Precision):
        numel = sum(p.detach().numel() for p in parameters)
        self.alike = alike
        self._weights = comm.ReplicatedBuffer(alike, numel, parameters[0], precision.compute)
        self._summands = comm.ReplicatedBuffer(alike, numel, parameters[0], precision.reduce)
        own = self._own()
        self.masters = MasterWeights(parameters, self._weights.local, own)
        self.gradient = self._summands.local[own]
        self._comm_dtype = precision.comm_dtype
        self.sets_grad_dtype = precision.reduce is not None and precision.reduce != precision.compute
        if self.sets_grad_dtype:
            for parameter in parameters:
                annotate(parameter, grad_dtype=precision.reduce)
        super().__init__(parameters, plane)

    def _own(self) -> slice:
        return self._weights.own

    def _allocate(self, numel):
        return self._summands.local

    def launch(self) -> None:
        super().launch()
        self.work = self._summands.sum_start(self._comm_dtype)

    def sum_over_holders(self, pipeline: Axis) -> None:
        sum_over_holders(self.gradient, self.holders, pipeline)

    def spread_start(self) -> comm.Work:
        """Begin to give the updated weights to the other ranks."""
        return self._weights.spread_start()


def scaling_of(precision: Precision) -> LossScale | None:
    return LossScale(precision.loss_scale) if precision.compute == torch.float16 else None
