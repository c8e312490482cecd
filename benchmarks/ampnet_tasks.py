"""Two tasks of the AMPNet paper that need no download: reductions of lists by a recurrent network with a loop in its
graph, and the sentiment of generated trees by a network that goes up each tree."""

import random

import torch
import torch.nn.functional as F
from torch import nn

from hpctrain.pipeline.ampnet import (
    Broadcast,
    Condition,
    Group,
    Join,
    Loss,
    MessageGraph,
    Source,
    Transform,
    Ungroup,
    loop_counter,
)

WIDTH = 128
DIGITS, OPERATIONS, LONGEST = 10, 4, 10  # tokens: ten digits, then the operations; a list has at most 10 tokens


class Score(nn.Linear):
    """Cross-entropy, the mean over the rows; how many rows are right, when it is evaluated."""

    def forward(self, h, target):
        scores = super().forward(h)
        if self.training:
            return F.cross_entropy(scores, target)
        return (scores.argmax(1) == target).sum().double()


# Lists ----------------------------------------------------------------------------------------------------------------


def reduced(operation, digits):
    """The target: one of four reductions, rounded, modulo 10. `digits` is (lists, length) float.

    >>> [reduced(operation, torch.tensor([[1.0, 2.0, 9.0, 5.0]])).item() for operation in range(4)]
    [4, 2, 8, 4]
    """
    if operation == 0:
        value = digits.mean(1)
    elif operation == 1:
        odd = digits[:, 1::2].mean(1) if digits.shape[1] > 1 else 0
        value = digits[:, 0::2].mean(1) - odd
    elif operation == 2:
        value = digits.amax(1) - digits.amin(1)
    else:
        value = torch.full((len(digits),), float(digits.shape[1]))
    return value.round().long() % DIGITS


def lists(count, seed, batch=100):
    """About `count` lists of 2 to 10 tokens, the first of which names the operation, in batches of one length: pairs
    (tokens, (length, batch); targets, (batch,))."""
    generator, made = torch.Generator().manual_seed(seed), []
    for _ in range(-(-count // batch)):
        length = 1 + int(torch.randint(LONGEST - 1, (), generator=generator))
        digits = torch.randint(DIGITS, (batch, length), generator=generator)
        operations = torch.randint(OPERATIONS, (batch,), generator=generator)
        target = torch.zeros(batch, dtype=torch.int64)
        for operation in range(OPERATIONS):
            rows = operations == operation
            if rows.any():
                target[rows] = reduced(operation, digits[rows].float())
        made.append((torch.cat([operations[:, None] + DIGITS, digits], 1).T.contiguous(), target))
    return made


class Recurrent(nn.Module):
    """relu(W [h, embedding of a token] + b)"""

    def __init__(self):
        super().__init__()
        self.embedding, self.linear = nn.Embedding(DIGITS + OPERATIONS, WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, h, tokens):
        return torch.relu(self.linear(torch.cat([h, self.embedding(tokens)], 1)))


def _tokens(instance):
    tokens = instance[0]
    first = 0, torch.zeros(tokens.shape[1], WIDTH), [0]
    return [first, *((1, tokens[t], [t]) for t in range(len(tokens)))]


def recurrent_graph():
    """The paper's recurrent network: the Join gives the cell the first h, or what the loop brings back; the Condition
    ends the loop where the list ends."""
    graph = MessageGraph()
    graph.add("source", Source(_tokens, outputs=2)).add("h", Join()).add("cell", Transform(Recurrent, inputs=2))
    graph.add("again", Condition(lambda state, instance: state[1] + 1 < len(instance[0])))
    graph.add("next", loop_counter()).add("score", Loss(lambda: Score(WIDTH, DIGITS)))
    for ends in (
        ("source", "h"), (("source", 1), ("cell", 1)), ("h", "cell"), ("cell", "again"), (("again", 0), "score"),
        (("again", 1), "next"), ("next", ("h", 1)),
    ):  # fmt: skip
        graph.connect(*ends)
    return graph


# Trees ----------------------------------------------------------------------------------------------------------------

WORDS, NEGATIONS = 40, 8  # words have a sentiment, -2 to 2; the last NEGATIONS turn that of what follows around


class Phrase:
    """A binary tree over words. Each node's sentiment is the clipped sum of its children's, and the opposite of the
    right one's where the left one is a negation; five classes, as in the Stanford treebank, at every node.

    Node n is a leaf where n < `leaves`; the others follow, children first; the last is the root.
    """

    def __init__(self, seed):
        rng = random.Random(seed)
        self.leaves = rng.randint(2, 12)
        words = [rng.randrange(WORDS) for _ in range(self.leaves)]
        self.words, self.parent = torch.tensor(words), {}
        values = [word % 5 - 2 if word < WORDS - NEGATIONS else 0 for word in words]
        negates = [word >= WORDS - NEGATIONS for word in words]
        tops = list(range(self.leaves))
        for node in range(self.leaves, 2 * self.leaves - 1):
            place = rng.randrange(len(tops) - 1)
            left, right = tops[place], tops.pop(place + 1)
            self.parent[left], self.parent[right] = (node, 0), (node, 1)
            tops[place] = node
            value = -values[right] if negates[left] else values[left] + values[right]
            values.append(max(-2, min(2, value)))
            negates.append(False)
        self.root = tops[0]
        self.targets = torch.tensor(values)[:, None] + 2


class Compose(nn.Module):
    """A child's rows [h of left; h of right] to the parent's: gated, as in a tree LSTM."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2 * WIDTH, 3 * WIDTH)

    def forward(self, children):
        gates, value = self.linear(children.view(1, -1)).split([2 * WIDTH, WIDTH], 1)
        kept = torch.sigmoid(gates.view(2, WIDTH)) * children
        return torch.tanh(value) + kept.sum(0, keepdim=True)


def tree_graph():
    """Words are embedded at once and ungrouped; every node is scored, and all but the root are grouped with their
    sibling and go to their parent."""
    graph = MessageGraph()
    graph.add("source", Source(lambda tree: [(0, tree.words, [])]))
    graph.add("embedding", Transform(lambda: nn.Embedding(WORDS, WIDTH)))
    graph.add("leaves", Ungroup(lambda state, tree: [((*state, leaf), 1) for leaf in range(tree.leaves)]))
    graph.add("node", Join()).add("root", Condition(lambda state, tree: state[1] == tree.root))
    graph.add("copies", Broadcast()).add("scored", Join())
    graph.add("score", Loss(lambda: Score(WIDTH, 5), given=lambda state, tree: tree.targets[state[1]]))
    graph.add("children", Group(_family))
    graph.add("compose", Transform(Compose))
    for ends in (
        ("source", "embedding"), ("embedding", "leaves"), ("leaves", "node"), ("node", "root"),
        (("root", 0), "copies"), (("copies", 0), "scored"), (("copies", 1), "children"), (("root", 1), ("scored", 1)),
        ("scored", "score"), ("children", "compose"), ("compose", ("node", 1)),
    ):  # fmt: skip
        graph.connect(*ends)
    return graph


def _family(state, tree):
    parent, place = tree.parent[state[1]]
    return (state[0], parent), place, 2


def trees(count, seed):
    return [Phrase(seed * 10**6 + number) for number in range(count)]
