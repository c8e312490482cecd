"""Local SGD: every replica trains by itself, and the weights are averaged now and then."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch

from hpctrain import comm
from hpctrain.data_parallel import optimizer_state
from hpctrain.data_parallel.buckets import BUCKET_BYTES, AllReducedGradBucket
from hpctrain.data_parallel.clipping import local_squares, replica_totals
from hpctrain.data_parallel.data_parallel import DataParallel
from hpctrain.grid import Axis, Grid
from hpctrain.rank_gradient import as_tensors
from hpctrain.shard import Shard
from hpctrain.shard_entries import Described, Entry


class LocalSGD(DataParallel):
    """Each replica takes steps on its own part of the batch; after `every` steps the weights become their average.

    The gradient of a replica is that of its own loss, so that its learning rate is that of a single process: the
    loss, which was divided by the size of all replicas' batches, is multiplied by their number. Where the optimizer's
    step is linear in the gradients, as is SGD's with any momentum, and nothing is clipped, `every=1` is data
    parallelism to rounding; otherwise this is another method, which converges for suitable learning rates.

    Each replica clips by the norm of its own gradient; reported are the loss over all of them, taken before their
    weights are averaged, and the root of the mean square of their norms. The sum of these two numbers is all that
    replicas exchange between averages. Gradients of parameters that are repeated inside a replica, over sequence and
    tensor axes or tied stages, are summed in every step as ever.

    Source: Zinkevich et al., "Parallelized Stochastic Gradient Descent" (2010), for every=0; Stich, "Local SGD
    Converges Fast and Communicates Little" (2019).

    Args:
        every: steps from average to average; 0: never but for `full_weights()`, called at a run's end (ParallelSGD).
        state: average the optimizer's state too (momentum and second moments); otherwise each replica keeps its own.

    Raises:
        ValueError: on every rank, where experts are spread over ranks, and for `every` below 0 or not whole.
    """

    alike = False

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        grid: Grid,
        optimizer: torch.optim.Optimizer,
        every: int = 1,
        state: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
    ):
        grid.check_whole_experts("data_parallel.method = local_sgd")
        if not isinstance(every, int) or every < 0:
            raise ValueError(f"data_parallel.average_every must be a whole number of steps, or 0, got {every}")
        super().__init__(parameters, grid, optimizer, bucket_bytes)
        self.every, self.average_state = every, state
        self._steps = torch.zeros((), dtype=torch.int64)  # since the last average
        self._buffers: dict[tuple, comm.AllReduceBuffer] = {}

    def _bucket(self, parameters: Sequence[torch.nn.Parameter], plane: Axis | None) -> AllReducedGradBucket:
        return AllReducedGradBucket(parameters, plane, self.grid.sequence)

    def finish_grad_sync(self) -> None:
        super().finish_grad_sync()
        if self.grid.replica.size > 1 and self.parameters:
            gradients = [p.grad for p in self.parameters if p.grad is not None]  # of all
            torch._foreach_mul_(gradients, float(self.grid.replica.size))

    def loss_and_grad_norm(self, loss: torch.Tensor) -> tuple[float, float]:
        grid = self.grid
        with as_tensors():
            totals = replica_totals(loss, local_squares(self.parameters, grid.coords), grid)
        comm.all_reduce(totals[:1], grid.sequence)
        self._norm = totals[1].sqrt().item()
        comm.all_reduce(totals, grid.replica)
        total, square = totals.tolist()
        return total, (square / grid.replica.size) ** 0.5

    def step(self, norm: float, max_norm: float) -> None:
        super().step(self._norm, max_norm)
        self._steps += 1
        if self._steps == self.every:
            self._steps.zero_()
            self._average([*self.parameters, *(self._states() if self.average_state else ())])

    def hand_over(self) -> None:
        super().hand_over()
        if self._steps > 0:
            self._average([*self.parameters])

    @contextlib.contextmanager
    def full_weights(self) -> Iterator[None]:
        """Within it the weights are the average; afterwards each replica has its own again."""
        if self._steps == 0 or not self.parameters:
            yield
            return
        weights: list[torch.Tensor] = [*self.parameters]
        own = [p.detach().clone() for p in weights]
        self._average(weights)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(weights, own)

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """As ever, and the average over the replicas of those, which `checkpoint export` takes too."""
        with super().averaged_weights():
            self._average([p for p in self.parameters if "ema" in self.optimizer.state.get(p, {})])
            yield

    def to_save(self, names: dict[torch.nn.Parameter, str]) -> list[Entry]:
        return [self._count(), *optimizer_state.own_to_save(names, self.optimizer, self.grid)]

    def to_load(self, names: dict[torch.nn.Parameter, str], saved: dict[str, Described]) -> list[Entry]:
        self._steps.zero_()
        counts = [self._count()] if optimizer_state.SINCE_AVERAGE in saved else []  # otherwise of another method
        return counts + optimizer_state.own_to_load(names, self.optimizer, saved, self.grid)

    def _count(self) -> Entry:
        return Entry(optimizer_state.SINCE_AVERAGE, Shard((), ()), self._steps)

    def _states(self) -> list[torch.Tensor]:
        """The optimizer's tensors that are as large as their parameter, in an order that all replicas share."""
        states = (self.optimizer.state[p] for p in self.parameters)
        return [v for state in states for v in state.values() if isinstance(v, torch.Tensor) and v.dim()]

    def _average(self, tensors: list[torch.Tensor]) -> None:
        """Replace every tensor by its average over the replicas; the same bits on all of them."""
        replica = self.grid.replica
        if replica.size == 1:
            return
        with torch.no_grad(), as_tensors():
            for dtype in dict.fromkeys(t.dtype for t in tensors):
                same = [t for t in tensors if t.dtype == dtype]
                sizes = [t.numel() for t in same]
                if (dtype, sum(sizes)) not in self._buffers:
                    self._buffers[dtype, sum(sizes)] = comm.AllReduceBuffer(replica, sum(sizes), same[0])
                buffer = self._buffers[dtype, sum(sizes)]
                places = [part.view_as(t) for t, part in zip(same, buffer.local.split(sizes))]
                torch._foreach_copy_(places, same)
                buffer.all_reduce().div_(replica.size)
                torch._foreach_copy_(same, places)
