"""The operators of a block, the rules by which a tensor box may divide each, and what moves between two of them.

Every operator has a choice of rules, from its dims to the axes of the box. Of a product of rows × in features by a
weight, each axis cuts one of three dims:

    rows    of input and output; the weight is spread over these ranks, and gathered: ZeRO-3's and Agarwal's third axis
    out     features of the output, and of the weight; the input is gathered: Megatron's column-parallel layer
    in      features of input and weight; outputs are summands: Megatron's row-parallel layer

Attention and element-wise operators have rows (attention: whole sequences) and features (heads) cut, or neither, when
all ranks of the axis do the same. What operators give is re-partitioned to what the next ones take, by the collective
of each axis; in backward the gradients go the other way, and what a product's input was gathered from is gathered once
more. Blocks are alike: the last operator gives the next block's first one what it takes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hpctrain.plan.job import Choice, Job
from hpctrain.plan.machine import Machine
from hpctrain.plan.network import Network
from hpctrain.plan.one_hot import OneHot
from hpctrain.plan.passes import BACKWARD, INNER, RESIDUAL, Box

# What an axis does to a tensor: it cuts its rows, or its features; ranks along it have the same, or summands.
ROWS, FEATURES, ALIKE, SUMMANDS = "rows", "features", "alike", "summands"
State = tuple[str, ...]  # of each axis


class Rule(NamedTuple):
    """How an operator may be divided.

    Attributes:
        cuts: the dim that each axis cuts; "" where all its ranks do the same.
        takes, gives: the states of its input and output in forward.
        takes_back, gives_back: those of the gradients of its output and input.
        seconds: of computing and of gathering weights, forward and backward.
        kept: bytes from forward to backward.
    """

    cuts: tuple[str, ...]
    takes: State
    gives: State
    takes_back: State
    gives_back: State
    seconds: float
    kept: float


class Operator(NamedTuple):
    """An operator with its rules. Its output has `elements`; `gathers` says that backward needs its input again."""

    name: str
    elements: int
    gathers: bool
    rules: list[Rule]


class Stage:
    """A block of a job on the tensor box of a choice.

    Raises:
        ValueError: for a mixture of experts.
    """

    def __init__(self, job: Job, machine: Machine, choice: Choice):
        if job.costs.mixture:
            raise ValueError("plans inside a stage are of blocks of attention and MLP, got a mixture of experts")
        self.job, self.network = job, Network(machine)
        self.box = Box(job, machine, self.network, choice)
        self.microbatches = choice.microbatches
        sizes = dict(zip("xyz", choice.box))
        self.axes = [axis for axis in "xyz" if sizes[axis] > 1]
        self.sizes = [sizes[axis] for axis in self.axes]
        self.groups = [self.box.groups[axis] for axis in self.axes]
        self.sequences = job.sequences(choice)
        self.rows = self.sequences * -(-job.costs.context // (choice.ring * choice.ulysses))
        self.operators, self.edges = self._graph()

    # The graph

    def _graph(self) -> tuple[list[Operator], list[tuple[int, int]]]:
        """The operators, and what follows what: the residual stream goes past the others."""
        costs = self.job.costs
        pairs = list(zip(costs.linears[::2], costs.linears[1::2]))
        operators: list[Operator] = []
        edges: list[tuple[int, int]] = []
        for number, (into, back) in enumerate(pairs):
            attends = number == 0 and costs.heads
            name = "attention" if attends else "mlp"
            start, after = len(operators), (len(operators) + 4) % (4 * len(pairs))
            operators += [
                self._stream(f"{name} norm", costs.width),
                self._product(f"{name} in", into.n_in, into.n_out),
                self._attention(into.n_out, back.n_in) if attends else self._activation(into.n_out, back.n_in),
                self._product(f"{name} out", back.n_in, back.n_out),
            ]
            edges += [(start, start + 1), (start + 1, start + 2), (start + 2, start + 3), (start + 3, after)]
            if after != start:
                edges.append((start, after))
        return operators, edges

    def _product(self, name: str, n_in: int, n_out: int) -> Operator:
        takes = {"rows": ROWS, "in": FEATURES, "out": ALIKE}
        gives = {"rows": ROWS, "in": SUMMANDS, "out": FEATURES}
        takes_back = gives | {"in": ALIKE}
        gives_back = takes | {"out": SUMMANDS}
        rules = []
        for cuts in itertools.product(("rows", "in", "out"), repeat=len(self.axes)):
            m, k, n = (self._part(length, cuts, dim) for length, dim in zip((self.rows, n_in, n_out), gives))
            seconds = self.box.product(m, k, n) + self.box.product(m, n, k) + self.box.product(k, m, n)
            seconds += self._weight(n_in * n_out, cuts)
            states = [tuple(map(table.__getitem__, cuts)) for table in (takes, gives, takes_back, gives_back)]
            rules.append(Rule(cuts, states[0], states[1], states[2], states[3], seconds, 0.0))
        return Operator(name, self.rows * n_out, True, rules)

    def _weight(self, elements: float, cuts: tuple[str, ...]) -> float:
        """Seconds in which it is gathered forward and backward over the axes that cut rows, and its gradient summed:
        once a step where that is put off."""
        summed = self.microbatches if "weight_gradient" in self.job.overlap else 1
        local = self.job.itemsize * elements / math.prod(self.sizes)
        total = 0.0
        for cut, size, group in zip(cuts, self.sizes, self.groups):
            if cut == "rows":
                local *= size
                total += 2 * self.network.all_gather(local, group) + self.network.reduce_scatter(local, group) / summed
        return total

    def _stream(self, name: str, width: int) -> Operator:
        """Norm, residual sum, dropout; a norm needs two numbers of a row from the ranks that share its features."""

        device = self.box.machine.device

        def seconds(cuts, rows, features):
            moved = 0.0
            for cut, size, group in zip(cuts, self.sizes, self.groups):
                if cut == "features":
                    moved += 2 * self.network.all_gather(2 * 4 * rows * size, group)
            kept = 2 * self.job.itemsize * rows * features
            return (1 + BACKWARD) * device.elementwise(RESIDUAL * kept, 0.0) + moved, kept

        return self._elementwise(name, ("rows", "features"), (self.rows, width), seconds, self.rows * width)

    def _activation(self, n_in: int, n_out: int) -> Operator:
        def seconds(cuts, rows, features):
            kept = self.job.itemsize * rows * features * (n_in + n_out) / n_out
            return (1 + BACKWARD) * self.box.machine.device.elementwise(0.0, INNER * kept), kept

        return self._elementwise("activation", ("rows", "features"), (self.rows, n_out), seconds, self.rows * n_out)

    def _attention(self, n_in: int, n_out: int) -> Operator:
        costs = self.job.costs
        length = self.rows // self.sequences

        def seconds(cuts, sequences, groups):
            heads = groups * costs.heads / self.job.groups
            scores = sequences * heads * length * costs.keys
            kept = self.job.itemsize * sequences * length * (n_in + n_out) * heads / costs.heads
            forward = self.box.attended(scores)
            between = self.box.machine.device.elementwise(0.0, INNER * kept)
            return (1 + self.box.attention_backward) * forward + (1 + BACKWARD) * between, kept

        lengths = self.sequences, self.job.groups
        return self._elementwise("attention", ("sequences", "heads"), lengths, seconds, self.rows * n_out)

    def _elementwise(self, name, dims, lengths, seconds, elements) -> Operator:
        state = {dims[0]: ROWS, dims[1]: FEATURES, "": ALIKE}
        rules = []
        for cuts in itertools.product((*dims, ""), repeat=len(self.axes)):
            local = (self._part(length, cuts, dim) for length, dim in zip(lengths, dims))
            states = tuple(map(state.__getitem__, cuts))
            rules.append(Rule(cuts, states, states, states, states, *seconds(cuts, *local)))
        return Operator(name, elements, False, rules)

    def _part(self, length: int, cuts: tuple[str, ...], dim: str) -> int:
        """Of a dim, on the rank that has the most."""
        return -(-length // math.prod(size for size, cut in zip(self.sizes, cuts) if cut == dim))

    # What moves

    def moving(self, elements: float, before: State, after: State) -> float:
        """Seconds of a re-partition, axis by axis, while as little as can be is on each rank: sums that are scattered
        first, what is gathered last."""
        there = [size for size, state in zip(self.sizes, before) if state in (ROWS, FEATURES)]
        local = self.job.itemsize * elements / math.prod(there)
        changes = [each for each in zip(before, after, self.sizes, self.groups) if each[0] != each[1]]
        total = 0.0
        for old, new, size, group in changes:
            if old in (SUMMANDS, ALIKE) and new != ALIKE:
                total += self.network.reduce_scatter(local, group) if old == SUMMANDS else 0.0
                local /= size
        for old, new, _, group in changes:
            if {old, new} == {ROWS, FEATURES}:
                total += self.network.all_to_all(local, group)
        for old, new, _, group in changes:
            if old == SUMMANDS and new == ALIKE:
                total += self.network.all_reduce(local, group)
        for old, new, size, group in changes:
            if old in (ROWS, FEATURES) and new == ALIKE:
                local *= size
                total += self.network.all_gather(local, group)
        return total

    def edge(self, u: Operator, v: Operator) -> np.ndarray:
        """Seconds by the rules of both: forward, backward, and what v needs again in backward."""
        known: dict[tuple[State, State], float] = {}

        def moving(before, after):
            if (before, after) not in known:
                known[before, after] = self.moving(u.elements, before, after)
            return known[before, after]

        found = np.zeros((len(u.rules), len(v.rules)))
        for (i, one), (j, other) in itertools.product(enumerate(u.rules), enumerate(v.rules)):
            found[i, j] = moving(one.gives, other.takes) + moving(other.gives_back, one.takes_back)
            if v.gathers:
                kept = tuple(new if old == SUMMANDS else old for old, new in zip(one.gives, other.takes))
                found[i, j] += moving(kept, other.takes)
        return found

    def problem(self, limit: float = math.inf) -> OneHot:
        """The graph of all choices."""
        costs = [np.array([rule.seconds for rule in operator.rules]) for operator in self.operators]
        kept = [np.array([rule.kept for rule in operator.rules]) for operator in self.operators]
        edges = {(u, v): self.edge(self.operators[u], self.operators[v]) for u, v in self.edges}
        return OneHot(costs, edges, kept, limit)

    def choices_of(self, cuts: Sequence[Sequence[str]]) -> list[int]:
        """The numbers of these rules, one of each operator."""
        return [
            [rule.cuts for rule in operator.rules].index(tuple(each)) for operator, each in zip(self.operators, cuts)
        ]

    def present(self) -> list[int]:
        """The rules of the layers on a box: `layers.rules.BOX`."""
        from hpctrain.layers.rules import BOX  # brings torch

        over = {name: [cut.axis for cut in cuts] for name, cuts in BOX.axes.items()}
        stream = {axis: "rows" for axis in over["rows"]} | {axis: "features" for axis in over["features"]}
        inner = {axis: 0 for axis in over["inner rows"]} | {axis: 1 for axis in over["inner features"]}

        def product(out, into):
            return {axis: "out" for axis in over[out]} | {axis: "in" for axis in over[into]} | {
                axis: "rows" for axis in over["inner rows"]
            }  # fmt: skip

        into, back = product("inner out", "residual in"), product("residual out", "inner in")
        tables = {"stream": stream, "in": into, "out": back}
        cuts = []
        for operator, role in zip(self.operators, self.roles()):
            attends = any("heads" in rule.cuts for rule in operator.rules)
            names = ("sequences", "heads") if attends else ("rows", "features")
            table = tables.get(role, {axis: names[dim] for axis, dim in inner.items()})
            cuts.append([table[axis] for axis in self.axes])
        return self.choices_of(cuts)

    def roles(self) -> list[str]:
        """Of each operator in the layers' rules: of the residual stream, a product into the inner layout, between such
        products, or a product back."""
        return ["stream", "in", "middle", "out"] * (len(self.operators) // 4)
