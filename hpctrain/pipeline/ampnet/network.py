"""A network of nodes, each on its rank: the model that a trainer is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from hpctrain import comm
from hpctrain.parameter import annotate
from hpctrain.pipeline.ampnet.message_graph import MessageGraph
from hpctrain.pipeline.ampnet.transform import Transform
from hpctrain.pipeline.draws import refuse_dropout
from hpctrain.randomness import RngKey, check_key, seeded
from hpctrain.shard import Shard

if TYPE_CHECKING:
    from hpctrain.grid import Grid


class MessageNetwork(torch.nn.Module):
    """This rank's nodes of a message graph.

        network = MessageNetwork(grid, graph, placement, key=ht.RngKey(0))
        optimizer = torch.optim.SGD([{"params": list(network.parameters())}], 0.1)
        trainer = ht.Trainer(network, grid, optimizer, AMPNet(max_active_keys=4))
        loss, _ = trainer.step(instances)

    Instances are any objects, the same on every rank. The loss modules divide by the instances of an update, so that
    the sum of `min_update_frequency` gradients is that of a batch.

    Args:
        grid: of pipeline ranks alone.
        graph: checked here; its nodes are this network's from now on.
        placement: {node: rank}; all on rank 0 by default. `ampnet.place` finds one.
        key: names the initial weights, which do not depend on the placement; by default drawn on the first rank.
        device: of the modules and of arriving messages.

    Attributes: `graph`, `placement`, and `node[name]`, the modules of this rank.

    Raises:
        ValueError: on every rank, for a graph that is not complete, a placement that leaves nodes out, two nodes that
            share a parameter, and torch's dropout.
    """

    def __init__(
        self, grid: Grid, graph: MessageGraph, placement: Mapping[str, int] | None = None, *, key: RngKey | None = None,
        device: torch.device | None = None,
    ):  # fmt: skip
        super().__init__()
        graph.check()
        placement = dict.fromkeys(graph.nodes, 0) if placement is None else dict(placement)
        for name in graph.nodes:
            if placement.get(name) not in range(grid.pipeline.size):
                raise ValueError(
                    f"placement must give node {name!r} one of {grid.pipeline.size} ranks, got {placement.get(name)}"
                )
        key = RngKey(grid.comm.bcast(int(torch.randint(2**62, ())))) if key is None else check_key(key)
        self.graph, self.placement, self.device = graph, placement, device
        self.node = torch.nn.ModuleDict()
        comm.start_watchdog(grid)  # as of `pipeline.Network`
        with comm.together(grid.world):
            for number, (name, node) in enumerate(graph.nodes.items()):
                if isinstance(node, Transform) and placement[name] == grid.pipeline.rank:
                    with seeded(key / number):
                        node.module = self.node[name] = node.make().to(device)
                    refuse_dropout(f"node {name}", node.module)
            self._describe()

    def _describe(self) -> None:
        """Give every parameter its shard."""
        seen: dict[torch.nn.Parameter, str] = {}
        for node, module in self.node.items():
            for name, parameter in module.named_parameters():
                if parameter in seen:
                    raise ValueError(f"nodes {seen[parameter]} and {node} share {name}; make them one node")
                seen[parameter] = node
                annotate(parameter, shard=Shard.whole(parameter.shape))

    def forward(self, *inputs: Any):
        raise TypeError("a MessageNetwork is run by ht.Trainer with a pipeline.AMPNet, not called")
