"""The event loop of one rank: takes what has arrived, works on it, and sends what follows.

No run deadlocks, whatever the graph, the placement and the order of arrival:
- No rank ever waits for a rank to receive. Sends are started and left alone (`comm.Mailbox`); a rank waits only where
  it has nothing to work on, and then it receives whatever comes from anybody. So every message sent is received.
- No message waits for another one but at a Transform, Broadcast, Group or Ungroup with several ports or members, and
  these wait for messages of the same instance. A graph in which one instance alone comes back to the source therefore
  does so for any number of them, in any order.
- The memory for what is under way is bounded: by `max_active_keys` times the messages of one instance.
The source admits an instance when one is done, so there is always one that can go on, until all are done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hpctrain import comm
from hpctrain.grid import Axis
from hpctrain.pipeline.ampnet.message_graph import MessageGraph
from hpctrain.pipeline.ampnet.metrics import Metrics
from hpctrain.pipeline.ampnet.node import BACKWARD, FORWARD, Message, Run, State
from hpctrain.pipeline.ampnet.ready import Item, Ready, Record, Replay
from hpctrain.pipeline.ampnet.source import Source
from hpctrain.pipeline.ampnet.transform import Loss, Transform
from hpctrain.trace import span

_DONE, _FAILED = -1, -2  # in place of an edge


class Engine:
    """Runs instances through a graph on the ranks of an axis.

    Args:
        axis: along which messages go.
        everybody: communicator (mpi4py) of all ranks, which decide alike on errors.
        placement: {node: rank of the axis}.
        max_active_keys: instances that are under way at most.
        device: of arriving tensors.
        metrics: are added to.

    `run` raises on every rank what any of them raised; the engine is of no more use then.
    """

    def __init__(
        self, axis: Axis, everybody: Any, graph: MessageGraph, placement: Mapping[str, int], max_active_keys: int,
        device: torch.device | None, metrics: Metrics,
    ):  # fmt: skip
        self.axis, self.everybody, self.graph, self.metrics = axis, everybody, graph, metrics
        self.max_active_keys = max_active_keys
        self._mailbox = comm.Mailbox(axis, device)
        self._rank = placement
        self._edge_of = {}  # (direction, node, port) -> number of the edge by which a message leaves
        for number, connection in enumerate(graph.connections):
            self._edge_of[FORWARD, connection.source, connection.out] = number
            self._edge_of[BACKWARD, connection.target, connection.port] = number
        self._ends = {  # (edge, direction) -> node and port where it arrives
            **{(i, FORWARD): (connection.target, connection.port) for i, connection in enumerate(graph.connections)},
            **{(i, BACKWARD): (connection.source, connection.out) for i, connection in enumerate(graph.connections)},
        }
        self.local = {name: node for name, node in graph.nodes.items() if placement[name] == axis.rank}
        source = self.local.get(graph.source)
        self._source = source if isinstance(source, Source) else None  # on its rank alone

    def run(
        self, instances: Sequence[Any], training: bool, record: Record | None = None, replay: list | None = None
    ) -> list[tuple]:
        """Take all instances through the graph and back; then every node has updated its weights. Returns this rank's
        losses as (state, loss). Collective.

        Args:
            instances: the same on every rank, or of each what the nodes of the rank ask for.
            record: is given the order of messages.
            replay: the order of a recorded run, of the same graph, placement and instances.
        """
        self._run, self._ready = Run(instances, training), Ready() if replay is None else Replay(replay)
        self._order: list[tuple[int, int, State]] | None = [] if record is not None else None
        self._admitted, self._over, self._failed = 0, False, False
        error = None
        try:
            losses = self._loop()
        except Exception as caught:
            error = caught
            self._tell_all(_FAILED)
        comm.agree(self.everybody, error)
        self._mailbox.finish()
        if record is not None and self._order is not None:
            record.runs.append(self._order)
        return losses

    def _loop(self) -> list[tuple]:
        for node in self.local.values():
            if isinstance(node, Loss):
                node.losses = []
        with self.metrics.run():
            self._admit()
            while not self._over:
                item = self._next()
                if item is not None:
                    self._work(item)
        if self._run.training and not self._failed:
            nodes = [node for node in self.local.values() if isinstance(node, Transform)]
            weights = [node.weights for node in nodes if node.weights is not None]
            for each in weights:
                each.finish()
            for each in weights:
                each.leave_gradient()
        return [loss for node in self.local.values() if isinstance(node, Loss) for loss in node.losses]

    def _admit(self) -> None:
        """On the rank of the source: let in what there is place for, and tell all when nothing is left."""
        if self._source is None:
            return
        instances = self._run.instances
        while self._admitted < len(instances) and self._source.active < self.max_active_keys:
            number, self._admitted = self._admitted, self._admitted + 1
            self._send(self.graph.source, self._source.admit(number, instances[number]))
        if self._admitted == len(instances) and not self._source.active:
            self._over = True
            self._tell_all(_DONE)

    def _next(self) -> Item | None:
        """The next message to work on; None where this rank is to stop."""
        self._take(self._mailbox.poll() if self.axis.size > 1 else [])
        while not self._over:
            item = self._ready.pop()
            if item is not None:
                return item
            assert self.axis.size > 1, "instances are under way, but no message is"
            with self.metrics.idle():
                letters = self._mailbox.recv_any()
            self._take(letters)
        return None

    def _take(self, letters: list[comm.Letter]) -> None:
        for (edge, direction, *state), payload in letters:
            if edge in (_DONE, _FAILED):
                self._over, self._failed = True, edge == _FAILED
            else:
                self._arrive(Item(edge, direction, Message(tuple(state), payload)))

    def _arrive(self, item: Item) -> None:
        self.metrics.arrived(self._ends[item.edge, item.direction][0])
        self._ready.push(item)

    def _work(self, item: Item) -> None:
        name, port = self._ends[item.edge, item.direction]
        if self._order is not None:
            self._order.append(item.name)
        node = self.local[name]
        kind, trace = "forward" if item.direction == FORWARD else "backward", self.axis.transport.trace
        with self.metrics.busy(name), span(trace, "pipeline", f"{kind} {name}"):
            emissions = (node.forward if item.direction == FORWARD else node.backward)(port, item.message, self._run)
        self._send(name, emissions)
        if node is self._source:
            self._admit()

    def _send(self, name: str, emissions) -> None:
        for direction, port, message in emissions:
            edge = self._edge_of[direction, name, port]
            rank = self._rank[self._ends[edge, direction][0]]
            if rank == self.axis.rank:
                self._arrive(Item(edge, direction, message))
            else:
                self._mailbox.post(rank, (edge, direction, *message.state), message.payload)

    def _tell_all(self, what: int) -> None:
        for rank in range(self.axis.size):
            if rank != self.axis.rank:
                self._mailbox.post(rank, (what, FORWARD))
