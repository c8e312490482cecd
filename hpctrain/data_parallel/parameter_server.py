"""Parameter servers: some ranks hold the weights and the optimizer, the others compute gradients and push them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from hpctrain import comm
from hpctrain.data_parallel import optimizer_state
from hpctrain.data_parallel.buckets import BUCKET_BYTES, GradBucket, sum_over_holders
from hpctrain.data_parallel.clipping import clip, square
from hpctrain.data_parallel.data_parallel import DataParallel
from hpctrain.data_parallel.master_weights import shard_optimizer
from hpctrain.data_parallel.optimizer_state import ParameterSlice
from hpctrain.grid import Axis, Grid
from hpctrain.parameter import annotate, shard_of
from hpctrain.shard import Shard, split_sizes

if TYPE_CHECKING:
    from hpctrain.shard_entries import Described, Entry


class ParameterServer(DataParallel):
    """The last `servers` ranks of the data axis serve, each an equal part of every bucket; the others, the workers,
    divide the batch. In a step the workers push their gradients, each bucket while backward still runs, the servers sum
    them in the order of ranks and update their part of the weights, and everybody pulls the new weights. On a grid with
    tensor or pipeline axes a place on the data axis is a whole replica: its ranks all serve, or all work.

    This is the step of data parallelism to rounding, with any optimizer that treats every element by itself. A worker
    sends and receives the size of the model once. Servers take part in every call of the trainer with batches that are
    empty; layers that communicate over the data axis (batch norm) need such a batch rather than none.

    Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (2014).

    Args:
        servers: how many ranks serve.

    Raises:
        ValueError: on every rank, for a data axis without a worker or a server, or whose ranks share sequences, and
            where experts are spread over ranks.
    """

    uses_grad, divides = False, True
    buckets: Sequence[ServedBucket]

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        grid: Grid,
        optimizer: torch.optim.Optimizer,
        servers: int = 1,
        bucket_bytes: int = BUCKET_BYTES,
    ):
        data = grid.data
        grid.check_whole_sequences("data_parallel.method = parameter_server")
        grid.check_whole_experts("data_parallel.method = parameter_server")
        if not 1 <= servers < data.size:
            raise ValueError(
                f"data_parallel.servers must leave a worker: at least 1 and below grid.data = {data.size}, "
                f"got {servers}"
            )
        self.servers, self.workers = servers, data.size - servers
        self.serves = data.rank >= self.workers
        super().__init__(parameters, grid, optimizer, bucket_bytes)
        self.pieces = [piece for bucket in self.buckets for piece in bucket.pieces()] if self.serves else []
        if self.serves:
            shard_optimizer(optimizer, self.pieces)
        self._take_optimizer()
        self.slices = [piece.local for piece in self.pieces]

    def _bucket(self, parameters: Sequence[torch.nn.Parameter], plane: Axis | None) -> ServedBucket:
        return SummedServedBucket(parameters, plane, self.grid.data, self.workers)

    def loss_and_grad_norm(self, loss: torch.Tensor) -> tuple[float, float]:
        counted = [piece.local.grad for piece in self.pieces if shard_of(piece.parameter).owned(self.grid.coords)]
        totals = torch.stack([loss, square([gradient for gradient in counted if gradient is not None])])
        for axis in (self.grid.tensor, self.grid.pipeline, self.grid.data):
            comm.all_reduce(totals, axis)
        total, squared = totals.tolist()
        return total, squared**0.5

    def step(self, norm: float, max_norm: float) -> None:
        self._stepped = True
        self._check_step()
        if self.serves:
            if max_norm:
                clip(self.slices, norm, max_norm)
            self.optimizer.step()
        self.weights_changed()

    def to_save(self, names: dict[torch.nn.Parameter, str]) -> list[Entry]:
        # The servers' weights are the latest: nothing is communicated, as another rank may fail at the same time.
        trained, frozen = self._divided(names)
        pieces = optimizer_state.pieces_to_save(trained, self.pieces, self.optimizer, self.grid, weights=True)
        return pieces + optimizer_state.parameters_to_save(frozen, self.grid)

    def to_load(self, names: dict[torch.nn.Parameter, str], saved: dict[str, Described]) -> list[Entry]:
        pieces = optimizer_state.pieces_to_load(names, self.pieces, self.optimizer, saved, weights=False)
        return optimizer_state.parameters_to_load(names, saved) + pieces

    def weights_changed(self) -> None:
        """Make everybody's weights those of the servers."""
        works = [comm.all_gather_start(bucket.own, self.grid.data, bucket.counts) for bucket in self.buckets]
        for bucket, work in zip(self.buckets, works):
            bucket.weights.copy_(work.wait())


class ServedBucket(GradBucket):
    """Parameters whose weights lie side by side, as do their gradients; each server holds an equal part of them.

    Attributes: `counts`, elements on each rank, none on workers; `weights`, flat, of which the parameters are views;
    `own`, this rank's part of them, and `gradient`, that part's gradient.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], plane: Axis | None, data: Axis, workers: int):
        super().__init__(parameters, plane)
        self.data = data
        self.counts = (0,) * workers + split_sizes(self.flat.numel(), data.size - workers)
        self.weights = torch.cat([p.detach().reshape(-1) for p in parameters])
        for parameter, part in zip(parameters, self.weights.split([p.detach().numel() for p in parameters])):
            parameter.data = part.view_as(parameter.detach())
        self.served = self.part(data.rank)
        self.own = self.weights[self.served]
        self.gradient = torch.zeros_like(self.own)

    def part(self, rank: int) -> slice:
        """The elements that a rank of the data axis serves."""
        first = sum(self.counts[:rank])
        return slice(first, first + self.counts[rank])

    def pieces(self) -> list[ParameterSlice]:
        """This server's, of the parameters, held as parameters themselves with a place for their gradients."""
        pieces, end = [], 0
        for parameter in self.parameters:
            start, end = end, end + parameter.detach().numel()
            low, high = max(start, self.served.start), min(end, self.served.stop)
            if low < high:
                within = slice(low - self.served.start, high - self.served.start)
                piece = torch.nn.Parameter(self.own[within])
                annotate(piece, shard=Shard.whole((high - low,)))
                piece.grad = self.gradient[within]
                pieces.append(ParameterSlice(parameter, low - start, high - start, piece))
        return pieces


class SummedServedBucket(ServedBucket):
    """The same, its gradients summed on the servers."""

    def launch(self) -> None:
        super().launch()
        self.work = comm.reduce_scatter_start(self.flat, self.data, self.counts).then(self.gradient.copy_)

    def sum_over_holders(self, pipeline: Axis) -> None:
        sum_over_holders(self.gradient, self.holders, pipeline)
