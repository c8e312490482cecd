"""The asynchronous parameter server: workers go at their own pace, none too far ahead of the slowest."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence

import torch

from hpctrain import comm
from hpctrain.data_parallel.buckets import BUCKET_BYTES
from hpctrain.data_parallel.clipping import clip, local_squares
from hpctrain.data_parallel.parameter_server import ParameterServer, ServedBucket
from hpctrain.grid import Axis, Grid

_CLOCK, _GRADIENT, _WEIGHTS, _STALENESS = range(4)  # tags


class WorkerNotFinite(FloatingPointError):
    """Raised on one worker, whose `loss` or `norm` is not finite; the others go on."""

    def __init__(self, worker: int, loss: float, norm: float):
        super().__init__(
            f"loss {loss} and gradient norm {norm} of worker {worker} are not both finite; use a smaller learning "
            "rate, or clip gradients"
        )
        self.worker, self.loss, self.norm = worker, loss, norm


class AsyncParameterServer(ParameterServer):
    """As `ParameterServer`, but a server updates its part of the weights at every push, with the gradient of the one
    worker's part of the batch, and gives that worker the weights at once. With SGD, as many pushes as there are workers
    make one step of data parallelism, each with gradients of somewhat older weights.

    A worker that has taken more than `staleness` steps more than the slowest waits for it. So no gradient is of weights
    to which more than (workers - 1) (2 staleness + 1) updates by others have come since they were pulled.

    On a worker the trainer's loss and norm are estimates from its own part of the batch, multiplied by the number of
    workers; servers return zeros. What a run gives depends on the speed of its ranks. With one worker it is the serial
    run exactly. A loss or gradient that is not finite is never pushed: it raises WorkerNotFinite on its worker alone,
    which is to end the job.

    Source: bounded staleness of Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
    Server" (2013).

    Args:
        staleness: steps that a worker may be ahead of the slowest, at least 0.

    Raises:
        ValueError: on every rank, for a grid with other axes than data, or without a worker or a server, and for
            `staleness` below 0 or not whole.
    """

    alike = False
    uses_grad = True  # a worker's own

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        grid: Grid,
        optimizer: torch.optim.Optimizer,
        servers: int = 1,
        staleness: int = 1,
        bucket_bytes: int = BUCKET_BYTES,
    ):
        if not isinstance(staleness, int) or staleness < 0:
            raise ValueError(f"data_parallel.staleness must be a whole number of steps, at least 0, got {staleness}")
        if grid.pipeline.size * grid.tensor.size > 1:
            raise ValueError(
                f"data_parallel.staleness = {staleness} lets every rank go its own way: it needs grid.pipeline = 1 and "
                f"grid.tensor = 1, got {grid.pipeline.size} and {[grid.shape[axis] for axis in 'xyz']}; use 0"
            )
        super().__init__(parameters, grid, optimizer, servers, bucket_bytes)
        self.staleness, self.lag = staleness, staleness + 1
        # By servers: updates so far, how many of them each worker's weights have, its steps, who waits for an answer.
        self._updates, self._pulled, self._clock = 0, [0] * self.workers, [0] * self.workers
        self._waiting: list[int] = []
        self._steps = 0
        self.histogram = torch.zeros((self.workers - 1) * (2 * staleness + 1) + 1, dtype=torch.int64)

    def _bucket(self, parameters: Sequence[torch.nn.Parameter], plane: Axis | None) -> ServedBucket:
        return ServedBucket(parameters, plane, self.grid.data, self.workers)

    def loss_and_grad_norm(self, loss: torch.Tensor) -> tuple[float, float]:
        if self.serves:
            return 0.0, 0.0
        totals = torch.stack([loss, local_squares(self.parameters, self.grid.coords).sum().sqrt()])
        total, norm = (self.workers * totals).tolist()
        if not (math.isfinite(total) and math.isfinite(norm)):
            raise WorkerNotFinite(self.grid.data.rank, total, norm)
        return total, norm

    def step(self, norm: float, max_norm: float) -> None:
        self._stepped = True
        self._check_step()
        self._steps += 1
        if self.serves:
            self._serve()
        else:
            if max_norm:
                clip(self.parameters, norm, max_norm)
            self._push_and_pull()

    @contextlib.contextmanager
    def full_weights(self) -> Iterator[None]:
        """All workers have taken the same number of steps; everybody takes the latest weights, and keeps them."""
        self.weights_changed()
        yield

    def hand_over(self) -> None:
        self.weights_changed()  # workers may lack the last updates by others
        super().hand_over()

    def weights_changed(self) -> None:
        super().weights_changed()
        self.loaded()

    def loaded(self) -> None:
        self._pulled = [self._updates] * self.workers

    def report(self) -> dict:
        """`staleness`: how many pushes so far were gradients of weights that lacked 0, 1, 2, … updates by others."""
        return {"staleness": self.histogram.tolist()}

    def _push_and_pull(self) -> None:
        data = self.grid.data
        leaving: list[comm.Work] = []
        arriving: list[comm.Work] = []
        for server in range(self.workers, data.size):
            leaving.append(comm.send_start(torch.tensor([self._steps]), data, server, _CLOCK))
            for bucket in self.buckets:
                part = bucket.part(server)
                leaving.append(comm.send_start(bucket.flat[part], data, server, _GRADIENT))
                arriving.append(comm.recv_start(bucket.weights[part], data, server, _WEIGHTS))
        arriving.append(comm.recv_start(self.histogram, data, self.workers, _STALENESS))
        for work in leaving + arriving:
            work.wait()

    def _serve(self) -> None:
        """Take pushes until every worker has taken as many steps as this server's trainer."""
        answers: list[comm.Work] = []
        while min(self._clock) < self._steps:
            worker = comm.probe(self.grid.data, _CLOCK)
            self._take(worker)
            self._waiting.append(worker)
            slowest = min(self._clock)
            ready = [w for w in self._waiting if self._clock[w] - slowest <= self.staleness]
            self._waiting = [w for w in self._waiting if w not in ready]
            for w in ready:
                answers += self._answer(w)
        for answer in answers:
            answer.wait()

    def _take(self, worker: int) -> None:
        """Receive a worker's gradient and update the weights by it."""
        data = self.grid.data
        self._clock[worker] = int(comm.recv(torch.zeros(1, dtype=torch.int64), data, worker, _CLOCK))
        for bucket in self.buckets:
            comm.recv(bucket.gradient, data, worker, _GRADIENT)
        self.optimizer.step()
        self.histogram[self._updates - self._pulled[worker]] += 1
        self._updates += 1

    def _answer(self, worker: int) -> list[comm.Work]:
        """Begin to send the weights as they are now."""
        data = self.grid.data
        self._pulled[worker] = self._updates
        answers = [comm.send_start(bucket.own.clone(), data, worker, _WEIGHTS) for bucket in self.buckets]
        if data.rank == self.workers:
            answers.append(comm.send_start(self.histogram.clone(), data, worker, _STALENESS))
        return answers
