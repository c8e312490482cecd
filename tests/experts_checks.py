"""A mixture of experts on a grid against one token after another, each through one chosen expert after another."""

import functools
import itertools
import math

import torch
import torch.nn.functional as F
from layer_checks import DOUBLE, KEY, whole

from hpctrain import Grid, comm
from hpctrain.layers import Mixture, Tokens
from hpctrain.shard import split

FEATURES, FFN, EXPERTS, TOP_K = 7, 6, 5, 2
# (replica, ring, ulysses) and (x, y, z) for each number of ranks
PLACES = {
    1: [((1, 1, 1), (1, 1, 1))],
    2: [((2, 1, 1), (1, 1, 1)), ((1, 2, 1), (1, 1, 1)), ((1, 1, 2), (1, 1, 1)), ((1, 1, 1), (2, 1, 1)),
        ((1, 1, 1), (1, 2, 1)), ((1, 1, 1), (1, 1, 2))],
    3: [((3, 1, 1), (1, 1, 1)), ((1, 1, 1), (1, 3, 1))],
    4: [((4, 1, 1), (1, 1, 1)), ((1, 2, 1), (1, 2, 1)), ((1, 1, 2), (2, 1, 1)), ((2, 1, 1), (1, 1, 2)),
        ((1, 1, 1), (2, 2, 1)), ((1, 2, 2), (1, 1, 1))],
    8: [((2, 1, 1), (2, 2, 1)), ((1, 2, 1), (1, 2, 2))],
}  # fmt: skip


@functools.cache
def grids(ranks, way="shared memory"):
    """The places of PLACES with all ranks as expert ranks, two of them and, at the first place, one; by "messages" with
    sends that wait."""
    found = []
    for data, tensor in PLACES[ranks]:
        first = (data, tensor) == PLACES[ranks][0]
        for expert in sorted({n for n in (1, 2, ranks) if ranks % n == 0 and (n > 1 or first)}):
            found.append(Grid(data=data, tensor=tensor, expert=expert))
    if way == "messages":
        use_messages(found)
    return found


# (replica, ring, ulysses), (x, y, z), expert and expert_tensor for each number of ranks
DIVIDED = {
    2: [((2, 1, 1), (1, 1, 1), 2, 2), ((1, 1, 1), (2, 1, 1), 2, 2), ((1, 2, 1), (1, 1, 1), 2, 2),
        ((1, 1, 1), (1, 2, 1), 2, 2)],
    3: [((3, 1, 1), (1, 1, 1), 3, 3)],
    4: [((4, 1, 1), (1, 1, 1), 4, 2), ((2, 1, 1), (2, 1, 1), 2, 2), ((2, 1, 1), (1, 2, 1), 4, 4),
        ((1, 1, 2), (1, 1, 2), 4, 2)],
}  # fmt: skip


@functools.cache
def divided(ranks, way="shared memory"):
    """Grids of which each expert is on several ranks; by "messages" as of `grids`."""
    found = [Grid(data, tensor=tensor, expert=n, expert_tensor=parts) for data, tensor, n, parts in DIVIDED[ranks]]
    if way == "messages":
        use_messages(found)
    return found


def use_messages(grids):
    """With sends that wait."""
    for grid in grids:
        grid.transport.synchronous = True
        for axis in grid.axes():
            axis.one_node = False


def spread(ranks, way="shared memory"):
    """Those of `grids` that have no expert twice."""
    return [grid for grid in grids(ranks, way) if grid.expert.size == ranks]


@functools.cache
def one_rank():
    from mpi4py import MPI

    return Grid(comm=MPI.COMM_SELF)


def mixture(grid, bias=None, **options):
    """With biases of some size, so that experts chosen with and without them differ."""
    sizes = {"features": FEATURES, "ffn": FFN, "experts": EXPERTS, "top_k": TOP_K, "key": KEY, **DOUBLE, **options}
    layer = Mixture(grid, **sizes)
    if layer.router.bias is not None:
        layer.router.bias.data.copy_(whole(layer.router.bias.shape, "bias", False) / 4 if bias is None else bias)
    return layer


def weights_of(layer):
    """Of a layer on one rank, as leaves."""
    return {name: p.detach().clone().requires_grad_(p.requires_grad) for name, p in layer.named_parameters()}


def tokens_on(grid, sequences, length, **options):
    """This rank's part of a step of so many sequences over all replicas."""
    part = split(sequences, grid.replica.size, grid.replica.rank)
    return Tokens.of(grid, part.stop - part.start, length, part.start, **options)


def block_of(grid, tokens, matrix):
    """This rank's block of a matrix of all tokens of the step."""
    rows = [row for run in tokens.residual_rows() for row in run]
    y = grid.tensor.y
    return matrix[rows][:, split(matrix.shape[1], y.size, y.rank)]


def summed_gradient(grid, parameter):
    """Over all ranks that hold the same slice."""
    axis, gradient = {"data": grid.data, "copies": grid.copies}[parameter.shard.alike], parameter.grad.clone()
    comm.all_reduce(gradient, axis)
    if parameter.shard.replicated:
        comm.all_reduce(gradient, grid.plane(*parameter.shard.replicated))
    return gradient


def close(ours, expected, words=""):
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12, msg=lambda text: f"{words}: {text}")


class Serial:
    """The layer, from its equations.

    Attributes, after a call: `chosen`, experts of each token, `dropped`, pairs of a token and an expert.
    """

    def __init__(self, layer):
        self.of = layer
        self.weights = weights_of(layer)

    def __call__(self, x, sequences, training=True):
        router, w = self.of.router, self.weights
        logits = x @ w["router.weight"].T
        scores = 1 / (1 + torch.exp(-logits)) if router.scores == "sigmoid" else F.softmax(logits, 1)
        self.scores, self.logits = scores, logits
        self.chosen = [self.choose(row) for row in scores.tolist()]
        self.dropped = self.drop(scores.tolist(), sequences) if training and self.of.experts.capacity else set()
        out = []
        for token, experts in enumerate(self.chosen):
            total = sum(scores[token, e] for e in experts) if router.normalized else 1
            mixed = torch.zeros_like(x[token])
            for e in experts:
                if (token, e) not in self.dropped:
                    mixed = mixed + router.scale * scores[token, e] / total * self.expert(e, x[token])
            out.append(mixed)
        out = torch.stack(out)
        if self.of.shared is not None:
            both = x @ w["shared.up.weight"].T
            hidden = F.silu(both[:, 0::2]) * both[:, 1::2] if self.gated else F.gelu(both)
            out = out + hidden @ w["shared.down.weight"].T
        return out

    @property
    def counts(self):
        return [sum(experts.count(e) for experts in self.chosen) for e in range(self.of.router.experts)]

    @property
    def gated(self):
        return self.of.experts.activation == "swiglu"

    def expert(self, e, x):
        both = self.weights["experts.up"][e] @ x
        hidden = F.silu(both[0]) * both[1] if self.gated else F.gelu(both)
        return self.weights["experts.down"][e] @ hidden

    def choose(self, scores):
        router = self.of.router
        bias = self.weights["router.bias"].tolist() if "router.bias" in self.weights else [0.0] * len(scores)
        biased = [score + b for score, b in zip(scores, bias)]
        size = len(scores) // router.groups
        groups = [biased[g * size : (g + 1) * size] for g in range(router.groups)]
        worth = [sum(sorted(group)[-2:]) if router.scores == "sigmoid" else max(group) for group in groups]
        best = sorted(range(router.groups), key=lambda g: (-worth[g], g))[: router.groups_kept]
        allowed = [e for e in range(len(scores)) if e // size in best]
        return sorted(allowed, key=lambda e: (-biased[e], e))[: router.top_k]

    def drop(self, scores, sequences):
        length, experts = len(scores) // sequences, len(scores[0])
        limit = math.ceil(self.of.experts.capacity * self.of.router.top_k * length / experts)
        dropped = set()
        for sequence, e in itertools.product(range(sequences), range(experts)):
            tokens = [t for t in range(sequence * length, (sequence + 1) * length) if e in self.chosen[t]]
            if self.of.experts.capacity_policy == "probability":
                tokens.sort(key=lambda t: (-scores[t][e], t))
            dropped |= {(t, e) for t in tokens[limit:]}
        return dropped

    def auxiliary(self, sequences):
        """The two losses, means over the sequences."""
        router = self.of.router
        length = len(self.chosen) // sequences
        scores = self.scores / self.scores.sum(1, keepdim=True) if router.scores == "sigmoid" else self.scores
        balance = z = 0
        for sequence in range(sequences):
            part = slice(sequence * length, (sequence + 1) * length)
            pairs = [e for experts in self.chosen[part] for e in experts]
            shares = [pairs.count(e) / len(pairs) for e in range(router.experts)]
            balance = balance + router.experts * sum(f * p for f, p in zip(shares, scores[part].mean(0)))
            z = z + self.logits[part].exp().sum(1).log().square().mean()
        return router.aux_loss * balance / sequences, router.z_loss * z / sequences


_SERIAL: dict = {}  # of each case, whatever the grid


def run_serially(sequences, options, x, training):
    """The serial twin after its backward; its output, the output's gradient and the input's."""
    case = sequences, *((name, str(options[name])) for name in sorted(options)), x.numpy().tobytes(), training
    if case not in _SERIAL:
        serial = Serial(mixture(one_rank(), **options))
        theirs = x.clone().requires_grad_()
        expected = serial(theirs, sequences, training)
        seed = whole(expected.shape, "seed", False)
        expected.backward(seed)
        _SERIAL[case] = serial, expected.detach(), seed, theirs.grad
    return _SERIAL[case]


def check(grid, sequences, length, options, x=None, training=True):
    """The layer on the grid, forward and gradients; returns it and its serial twin."""
    x = whole((sequences * length, options.get("features", FEATURES)), "x", False) if x is None else x
    serial, expected, seed, gradient = run_serially(sequences, options, x, training)
    layer = mixture(grid, **options).train(training)
    tokens = tokens_on(grid, sequences, length)
    words = f"{grid.describe().splitlines()[0]}, expert {grid.expert.size}, {options}"
    block = block_of(grid, tokens, x).clone().requires_grad_()
    y = layer(block, tokens)
    close(y.detach(), block_of(grid, tokens, expected), words)
    y.backward(block_of(grid, tokens, seed))
    close(block.grad, block_of(grid, tokens, gradient), words)
    compare_gradients(grid, layer, serial, words)
    return layer, serial


def compare_gradients(grid, layer, serial, words=""):
    for name, parameter in layer.named_parameters():
        if parameter.requires_grad:
            theirs = serial.weights[name].grad
            theirs = torch.zeros_like(serial.weights[name]) if theirs is None else theirs
            close(summed_gradient(grid, parameter), theirs[parameter.shard.slices], f"{name}, {words}")
