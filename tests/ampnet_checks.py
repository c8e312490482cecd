"""Message graphs of each shape, and the same networks as plain programs of torch on one rank."""

import functools
import random

import torch
from torch import nn

from hpctrain import Grid
from hpctrain.pipeline.ampnet import (
    Broadcast,
    Condition,
    Group,
    Join,
    Loss,
    MessageGraph,
    Restate,
    Source,
    Transform,
    Ungroup,
    concat,
    loop_counter,
    split,
)


@functools.cache  # a grid makes several communicators
def chain_of_ranks(size):
    return Grid(pipeline=size)


WIDTH, TYPE = 5, torch.float64


def linear(inputs=WIDTH, outputs=WIDTH):
    return lambda: nn.Linear(inputs, outputs, dtype=TYPE)


class Cell(nn.Sequential):
    """tanh(W [a b] + c)"""

    def __init__(self):
        super().__init__(nn.Linear(2 * WIDTH, WIDTH, dtype=TYPE), nn.Tanh())

    def forward(self, x):
        return super().forward(x)


class Head(nn.Linear):
    """A linear layer and the squared error, or nothing but the number 1 when it is evaluated."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH, dtype=TYPE)

    def forward(self, x, target):
        error = (super().forward(x) - target).square().sum()
        return error if self.training else torch.ones_like(error)


class Add(nn.Module):
    def forward(self, *inputs):
        total = inputs[0]
        for x in inputs[1:]:
            total = total + x
        return total


def draw(number, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(number), dtype=TYPE)


# Each: the graph, its instances, and the loss of one instance as a plain program of the nodes' modules ---------------


def chain():
    graph = MessageGraph()
    graph.add("source", Source()).add("a", Transform(linear())).add("tanh", Transform(nn.Tanh)).add("b", Loss(Head))
    graph.connect("source", "a").connect("a", "tanh").connect("tanh", "b")
    return graph


def chain_instances(count):
    return [(draw(i, 1 + i % 3, WIDTH), draw(100 + i, 1 + i % 3, WIDTH)) for i in range(count)]


def chain_loss(node, instance):
    return node["b"](node["tanh"](node["a"](instance[0])), instance[1])


def branch():
    """Three ways at once, one of them cut and joined, and one that only every second instance takes."""
    graph = MessageGraph()
    graph.add("source", Source()).add("a", Transform(linear())).add("copies", Broadcast(3))
    graph.add("b", Transform(linear())).add("c", Transform(linear())).add("d", Transform(linear()))
    graph.add("which", Condition(lambda state, instance: state[0] % 2)).add("either", Join())
    graph.add("cut", split([2, WIDTH - 2])).add("left", Transform(nn.Tanh)).add("joined", concat())
    graph.add("sum", Transform(Add, inputs=3)).add("head", Loss(Head))
    for ends in (
        ("source", "a"), ("a", "copies"), (("copies", 0), "b"), (("copies", 1), "which"), (("copies", 2), "cut"),
        (("which", 0), "c"), (("which", 1), "d"), ("c", "either"), ("d", ("either", 1)), (("cut", 0), "left"),
        ("left", "joined"), (("cut", 1), ("joined", 1)), ("b", "sum"), ("either", ("sum", 1)),
        ("joined", ("sum", 2)), ("sum", "head"),
    ):  # fmt: skip
        graph.connect(*ends)
    return graph


def branch_loss(node, instance, number):
    x = node["a"](instance[0])
    b, either = node["b"](x), node["d" if number % 2 else "c"](x)
    left, right = x.split([2, WIDTH - 2], -1)
    return node["head"](b + either + torch.cat([left.tanh(), right], -1), instance[1])


def loop():
    """A recurrent network over as many steps as the instance has."""
    graph = MessageGraph()
    graph.add("source", Source(_steps, outputs=2)).add("start", Join()).add("pair", concat())
    graph.add("cell", Transform(Cell)).add("next", loop_counter()).add("head", Loss(Head))
    graph.add("again", Condition(lambda state, instance: state[1] + 1 < len(instance[0])))
    for ends in (
        ("source", "start"), ("start", "pair"), (("source", 1), ("pair", 1)), ("pair", "cell"), ("cell", "again"),
        (("again", 1), "next"), ("next", ("start", 1)), (("again", 0), "head"),
    ):  # fmt: skip
        graph.connect(*ends)
    return graph


def _steps(instance):
    x = instance[0]
    return [(0, torch.zeros_like(x[0]), (0,)), *((1, x[t], (t,)) for t in range(len(x)))]


def loop_instances(count):
    return [(draw(i, 1 + i * 5 % 7, 2, WIDTH), draw(100 + i, 2, WIDTH)) for i in range(count)]


def loop_loss(node, instance):
    x = instance[0]
    h = torch.zeros_like(x[0])
    for step in x:
        h = node["cell"](torch.cat([h, step], -1))
    return node["head"](h, instance[1])


class Tree:
    """Node n has the children `children[n]`, both lower than n, or none; the last is the root. A target for each."""

    def __init__(self, number, leaves):
        rng, self.children, tops = random.Random(number), {}, list(range(leaves))
        for node in range(leaves, 2 * leaves - 1):
            place = rng.randrange(len(tops) - 1)
            self.children[node] = tops[place], tops.pop(place + 1)
            tops[place] = node
        self.root, self.leaves = tops[0], leaves
        self.parent = {c: (node, place) for node, both in self.children.items() for place, c in enumerate(both)}
        self.x, self.targets = draw(number, leaves, WIDTH), draw(100 + number, 2 * leaves - 1, WIDTH)


def tree():
    """Leaves are ungrouped from one message; every inner node groups its children; every node has a loss."""
    graph = MessageGraph()
    graph.add("source", Source(lambda tree: [(0, tree.x, ())])).add("leaves", Ungroup(_leaves))
    graph.add("leaf", Transform(linear())).add("node", Join())
    graph.add("root", Condition(lambda state, tree: state[1] == tree.root)).add("copies", Broadcast())
    graph.add("scored", Join()).add("head", Loss(Head, given=lambda state, tree: tree.targets[state[1]]))
    graph.add("children", Group(_family)).add("flat", Transform(lambda: nn.Flatten(0)))
    graph.add("cell", Transform(Cell)).add("row", Transform(lambda: nn.Unflatten(0, (1, WIDTH))))
    for ends in (
        ("source", "leaves"), ("leaves", "leaf"), ("leaf", "node"), ("node", "root"), (("root", 0), "copies"),
        ("copies", "scored"), (("copies", 1), "children"), (("root", 1), ("scored", 1)), ("scored", "head"),
        ("children", "flat"), ("flat", "cell"), ("cell", "row"), ("row", ("node", 1)),
    ):  # fmt: skip
        graph.connect(*ends)
    return graph


def _leaves(state, tree):
    return [((*state, leaf), 1) for leaf in range(tree.leaves)]


def _family(state, tree):
    node, place = tree.parent[state[1]]
    return (state[0], node), place, 2


def tree_loss(node, tree):
    """Ascending, so that autograd adds the gradients of the highest node first."""
    h, losses = {}, []
    for number in range(tree.root + 1):
        if number < tree.leaves:
            h[number] = node["leaf"](tree.x[number : number + 1])
        else:
            h[number] = node["cell"](torch.cat([h[c].flatten() for c in tree.children[number]]))[None]
        losses.append(node["head"](h[number], tree.targets[number]))
    return losses


SHAPES = {
    "chain": (chain, chain_instances, lambda node, instance, number: [chain_loss(node, instance)]),
    "branch": (branch, chain_instances, lambda node, instance, number: [branch_loss(node, instance, number)]),
    "loop": (loop, loop_instances, lambda node, instance, number: [loop_loss(node, instance)]),
    "tree": (
        tree,
        lambda count: [Tree(i, 1 + i * 3 % 7) for i in range(count)],
        lambda node, instance, number: tree_loss(node, instance),
    ),
}  # fmt: skip


# Graphs drawn at random ----------------------------------------------------------------------------------------------


def random_graph(seed):
    """Blocks within blocks, first a loop: transforms, loops of a number of turns that depends on the instance, branches
    that are added up, choices, and rows that go their own ways. Every message has WIDTH columns."""
    rng, graph = random.Random(seed), MessageGraph()
    graph.add("source", Source())
    names = iter(f"n{i}" for i in range(1000))

    def add(node):
        name = next(names)
        graph.add(name, node)
        return name

    def block(end, depth, level, whole=True, kind=None):
        """Adds a block behind `end`, gives its own end. `level`: numbers in the state; `whole`: not cut into rows."""
        kinds = ["linear", "chain", "loop", "branch", "choice", "rows"] if depth else ["linear"]
        kind = kind or rng.choice(kinds if whole else [k for k in kinds if k != "rows"])
        if kind == "linear":
            name = add(Transform(linear()))
            graph.connect(end, name)
            return name
        if kind == "chain":
            return block(block(end, depth - 1, level, whole), depth - 1, level, whole)
        if kind == "loop":
            turns = rng.randint(1, 3)
            enter = add(Restate(lambda state, instance: (*state, 0)))
            join, count = add(Join()), add(loop_counter(level))
            again = add(Condition(lambda s, i: int(s[level] < (s[0] + turns) % 4)))
            leave = add(Restate(lambda state, instance: state[:level]))
            graph.connect(end, enter).connect(enter, join)
            graph.connect(block(join, depth - 1, level + 1, whole), again).connect((again, 1), count)
            graph.connect(count, (join, 1)).connect((again, 0), leave)
            return leave
        if kind == "branch":
            ways = rng.randint(2, 3)
            copies, total = add(Broadcast(ways)), add(Transform(Add, inputs=ways))
            graph.connect(end, copies)
            for way in range(ways):
                graph.connect(block((copies, way), depth - 1, level, whole), (total, way))
            return total
        if kind == "choice":
            which, either = add(Condition(lambda s, i: sum(s) % 2)), add(Join())
            graph.connect(end, which)
            for way in range(2):
                graph.connect(block((which, way), depth - 1, level, whole), (either, way))
            return either
        cut = add(Ungroup(lambda state, instance: [((*state, row), 1) for row in range(len(instance[0]))]))
        again = add(Group(lambda state, instance: (state[:level], state[level], len(instance[0]))))
        graph.connect(end, cut).connect(block(cut, depth - 1, level + 1, False), again)
        return again

    graph.add("head", Loss(Head))
    graph.connect(block(block("source", 2, 1, kind="loop"), 3, 1), "head")
    return graph


def random_placement(seed, graph, ranks):
    rng = random.Random(seed)
    return {name: rng.randrange(ranks) for name in graph.nodes}
