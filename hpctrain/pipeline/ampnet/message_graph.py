"""The static graph: nodes by name, and which port leads to which."""

from __future__ import annotations

from typing import NamedTuple

from hpctrain.pipeline.ampnet.node import Node
from hpctrain.pipeline.ampnet.source import Source
from hpctrain.pipeline.ampnet.transform import Loss, Transform

End = str | tuple[str, int]


class Connection(NamedTuple):
    """From an out port to an in port."""

    source: str
    out: int
    target: str
    port: int


class MessageGraph:
    """A static graph of nodes; cycles are loops, which messages leave by a `Condition`.

        graph = MessageGraph()
        graph.add("source", Source())
        graph.add("body", Transform(lambda: nn.Linear(8, 8)))
        graph.add("loss", Loss(Head))
        graph.connect("source", "body").connect("body", "loss")

    Attributes:
        nodes: by name, in the order in which they were added.
        connections: in the order in which they were made.
    """

    def __init__(self):
        self.nodes: dict[str, Node] = {}
        self.connections: list[Connection] = []

    def add(self, name: str, node: Node) -> MessageGraph:
        """A node; every node object belongs to one network."""
        if name in self.nodes:
            raise ValueError(f"there is a node {name!r} already; choose another name")
        self.nodes[name] = node
        return self

    def connect(self, source: End, target: End) -> MessageGraph:
        """An out port to an in port: "name" is port 0 of the node, ("name", 1) its port 1."""
        ends = [(end, 0) if isinstance(end, str) else end for end in (source, target)]
        for (name, port), what in zip(ends, ("outputs", "inputs")):
            if name not in self.nodes:
                raise ValueError(f"there is no node {name!r}; add it before it is connected")
            if not 0 <= port < getattr(self.nodes[name], what):
                raise ValueError(f"{name!r} has {getattr(self.nodes[name], what)} {what}, got port {port}")
        connection = Connection(*ends[0], *ends[1])
        for other in self.connections:
            if connection[:2] == other[:2] or connection[2:] == other[2:]:
                raise ValueError(f"{connection} meets {other}: a port has one connection; use a Broadcast or a Join")
        self.connections.append(connection)
        return self

    def check(self) -> None:
        """Raise ValueError unless there is one source, a loss, and every port is connected."""
        sources = [name for name, node in self.nodes.items() if isinstance(node, Source)]
        if len(sources) != 1:
            raise ValueError(f"a graph has one Source, got {sources}")
        if not any(isinstance(node, Loss) for node in self.nodes.values()):
            raise ValueError("a graph has at least one Loss, from which gradients begin")
        wanted = {(name, what, port) for name, node in self.nodes.items() for what in ("outputs", "inputs")
                  for port in range(getattr(node, what))}  # fmt: skip
        for connection in self.connections:
            wanted -= {(connection.source, "outputs", connection.out), (connection.target, "inputs", connection.port)}
        if wanted:
            name, what, port = min(wanted)
            raise ValueError(f"port {port} of the {what} of {name!r} is not connected")
        for connection in self.connections:  # nobody wants the gradient by what the source sends
            target = self.nodes[connection.target]
            if isinstance(self.nodes[connection.source], Source) and isinstance(target, Transform):
                target.differentiated[connection.port] = False

    @property
    def source(self) -> str:
        """The name of the source."""
        return next(name for name, node in self.nodes.items() if isinstance(node, Source))

    def forward_edges(self) -> list[tuple[int, int]]:
        """Pairs of nodes, by their numbers, without those that close a loop, seen from the source."""
        number = {name: i for i, name in enumerate(self.nodes)}
        out: dict[int, list[int]] = {i: [] for i in number.values()}
        for connection in self.connections:
            if number[connection.target] not in out[number[connection.source]]:
                out[number[connection.source]].append(number[connection.target])
        edges, state = [], {}  # state: 1 on the path, 2 done
        stack = [(number[self.source], iter(out[number[self.source]]))]
        state[stack[0][0]] = 1
        while stack:
            node, targets = stack[-1]
            target = next(targets, None)
            if target is None:
                state[node] = 2
                stack.pop()
            elif state.get(target) != 1:
                edges.append((node, target))
                if target not in state:
                    state[target] = 1
                    stack.append((target, iter(out[target])))
        return edges
