"""Forward, backward and updates of one step by messages; see `pipeline.ampnet`."""

from __future__ import annotations

from typing import Any

import torch

from hpctrain import comm
from hpctrain.data_parallel import DataParallelStrategy
from hpctrain.grid import Grid
from hpctrain.models.staged_model import StagedModel
from hpctrain.pipeline import AMPNet
from hpctrain.pipeline.ampnet import Engine, MessageNetwork, Record, Transform, Weights, chain_of
from hpctrain.pipeline.ampnet.metrics import Metrics
from hpctrain.train.forward_backward import check_own_updates


class MessageDriven:
    """A step's instances (of a model cut into stages, its microbatches) through a graph of nodes; at the end of a step
    none is under way, and all gradients are in the weights: what is saved then is all there is.

    Args: as of `train.trainer.Trainer`, and such as `check_message_driven` takes.

    Attributes:
        metrics: of this rank, since the last report.
        record: None, or the record that every further step is added to.
        replay: None, or the record whose runs the next steps repeat, one after another from the first.
    """

    updates = True

    def __init__(
        self, model: StagedModel | MessageNetwork, grid: Grid, options: AMPNet, strategy: DataParallelStrategy
    ):
        self.model, self.grid, self.options, self.metrics = model, grid, options, Metrics()
        graph, placement = (model.graph, model.placement) if isinstance(model, MessageNetwork) else chain_of(model)
        self._engine = Engine(
            grid.pipeline, grid.comm, graph, placement, options.max_active_keys, model.device, self.metrics
        )
        self._weights: dict[str, Weights] = {}  # by node
        for name, node in self._engine.local.items():
            if isinstance(node, Transform):
                assert node.module is not None  # this rank owns the node
                parameters = dict(node.module.named_parameters())
                node.weights = self._weights[name] = Weights(parameters, strategy.optimizer, options)
        self.record: Record | None = None
        self.replay = None

    @property
    def replay(self) -> Record | None:
        return self._replay

    @replay.setter
    def replay(self, record: Record | None) -> None:
        self._replay, self._repeated = record, 0

    def check(self, instances: list) -> None:
        """Any number of instances will do."""

    def train(self, instances: list) -> list[torch.Tensor]:
        """The losses that were computed here, by instance; of several updates the mean, as `PipelinedModel` has it.

        Raises:
            ValueError: where `replay` has no further run.
        """
        losses = self._engine.run(instances, True, self.record, self._next_order())
        if isinstance(self.model, StagedModel):
            self.model.check_draws()
        updates = -(-len(instances) // self.options.min_update_frequency)
        return [loss / updates for _, loss in sorted(losses, key=lambda each: each[0])]

    def _next_order(self) -> list | None:
        if self.replay is None:
            return None
        if self._repeated == len(self.replay.runs):
            raise ValueError(
                f"replay has {self._repeated} steps, and all were repeated; take no more, or set replay=None"
            )
        self._repeated += 1
        return self.replay.runs[self._repeated - 1]

    def evaluate(self, instances: list) -> list[torch.Tensor]:
        return [loss for _, loss in sorted(self._engine.run(instances, False), key=lambda each: each[0])]

    def report(self) -> dict[str, Any]:
        """Since the last call: by node the longest queue, messages, seconds of work, and the staleness of gradients so
        far (how many were 0, 1, 2, … updates old); by rank the part of the time in which it did not wait. Collective.
        """
        metrics = self.metrics
        nodes: dict[str, dict[str, Any]] = {}
        for name in self._engine.local:
            nodes[name] = {
                "queue": metrics.longest[name],
                "messages": metrics.messages[name],
                "seconds": metrics.work[name],
            }
        for name, weights in self._weights.items():
            stale = weights.staleness
            if weights.trained:
                nodes[name]["staleness"] = [stale[age] for age in range(1 + max(stale, default=0))]
        mine = nodes, metrics.occupancy, metrics.idle_seconds
        everybody = comm.all_gather_object(mine, self.grid.pipeline)
        metrics.clear()
        joined = {name: found for nodes, _, _ in everybody for name, found in nodes.items()}
        return {
            "nodes": joined,
            "occupancy": [occupancy for _, occupancy, _ in everybody],
            "idle": [idle for _, _, idle in everybody],
        }


def check_message_driven(
    model: StagedModel | MessageNetwork, grid: Grid, strategy: type[DataParallelStrategy], max_norm: float
) -> None:
    """Raise ValueError, on every rank, for what does not go with nodes that update by themselves, in an order of their
    own."""
    if grid.data.size * grid.tensor.size > 1:
        raise ValueError(
            "AMPNet lets every rank go its own way, which ranks that sum gradients or share a layer cannot: use "
            f"grid.data = 1 and grid.tensor = 1, got {grid.data.size} and {[grid.shape[axis] for axis in 'xyz']}"
        )
    if isinstance(model, StagedModel) and len(model.placement) != model.last + 1:
        raise ValueError("AMPNet has one replica of each stage; use placement {(0, stage): rank}")
    with comm.together(grid.world):  # not every rank holds weights that are shared
        check_own_updates("AMPNet", model, strategy, max_norm)
