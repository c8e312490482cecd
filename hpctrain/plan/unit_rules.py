"""What the units of a model cost divided and whole, and what moves between them: the graph of all plans that
`parallelize` can carry out, with whole activations around units or with sharded ones.

A unit takes its input in one of these ways, and moves in backward what the adjoint needs:

    WHOLE   every rank takes all of it, and does the same
    ENTER   every rank takes all of it to make its part; the gradients are summed
    BOX     the same on a box, where it takes tokens over z and features over y
    PART    every rank takes its part of the features; the gradients are gathered
    ROWS    of some tokens
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hpctrain.convert.units import DividedUnit
from hpctrain.plan.call_trace import Product, Work
from hpctrain.plan.network import Group
from hpctrain.plan.one_hot import OneHot
from hpctrain.plan.passes import BACKWARD, INNER, RESIDUAL, Box, update_seconds

WHOLE, ENTER, BOX, PART, ROWS = "whole", "enter", "box", "part", "rows"


class UnitChoice(NamedTuple):
    """A way to carry out a unit, or what lies between units.

    Attributes:
        divided: of a unit.
        takes: how it takes its input; or of each of its inputs, WHOLE or ROWS.
        gives: WHOLE or ROWS.
        seconds: forward, backward and update, but for what moves on the way in.
        memory: bytes of weights, gradients, the optimizer's state, and of what is kept for backward.
    """

    divided: bool
    takes: str | tuple[str, ...]
    gives: str
    seconds: float
    memory: float


class UnitGraph:
    """All choices of a traced model.

    Args:
        work: of a call on one rank; `units`, those that it numbers.
        box: of ranks, with rates and the network of a machine.
        shards: whether what leaves pairs stays divided by tokens.
    """

    def __init__(self, work: Sequence[Work], units: Sequence[DividedUnit], box: Box, shards: bool):
        self.work, self.units, self.box, self.shards = work, units, box, shards
        self.size, self.ranks = box.job.itemsize, box.x * box.y * box.z
        self.line = Group(self.ranks)
        self.inputs = [sorted(each.inputs) for each in work]
        self.choices = [self._choices(each) for each in work]

    # Nodes

    def _choices(self, work: Work) -> list[UnitChoice]:
        if work.unit is None:
            return self._between(work)
        unit = self.units[work.unit]
        elements, share = unit.elements, unit.share
        all_of_it = UnitChoice(
            False, WHOLE, WHOLE, self._compute(work, unit, 1.0) + self._update(elements),
            self._memory(elements, work.elements + work.out),
        )  # fmt: skip
        if unit.moves == "weights":
            return [all_of_it, self._gathered(work, unit)]
        moved, memory = self.box.machine.learned.tensor, self._memory(elements * share, self._kept(work, share))
        seconds = self._compute(work, unit, share) + self._update(elements * share)
        seconds += moved * (self._inside(work, unit) + self._leaving(work, unit))
        takes = {"pair": BOX if unit.on_box and self.shards else ENTER, "output": ENTER, "input": PART}[unit.moves]
        gives = ROWS if self.shards and unit.moves == "pair" else WHOLE
        return [all_of_it, UnitChoice(True, takes, gives, seconds, memory)]

    def _gathered(self, work: Work, unit: DividedUnit) -> UnitChoice:
        """Every rank does the work, with weights that it has a part of."""
        net, elements = self.box.network, unit.elements * unit.share
        moving = self.box.machine.learned.tensor * net.all_gather(self.size * unit.elements, self.line)
        seconds = self._compute(work, unit, 1.0) + moving + self._update(elements)
        return UnitChoice(True, WHOLE, WHOLE, seconds, self._memory(elements, work.elements + work.out))

    def _between(self, work: Work) -> list[UnitChoice]:
        """It has the tokens of a rank where it can go on with them and is given any."""
        net, moved, choices = self.box.network, self.box.machine.learned.tensor, []
        states = (WHOLE, ROWS) if self.shards and work.by_rows else (WHOLE,)
        for takes in itertools.product(states, repeat=len(work.inputs)):
            rows = ROWS in takes
            share = 1 / self.ranks if rows else 1.0
            elements = work.elements * share
            seconds = sum(map(self._product, work.products)) + self._mixing(work)
            seconds = self._launched(seconds + self._elementwise(RESIDUAL, elements), work)
            seconds += self._update(work.weights)
            if rows and work.weights:
                seconds += moved * net.all_reduce(self.size * work.weights, self.line)
            memory = self._memory(work.weights, elements)
            choices.append(UnitChoice(False, takes, ROWS if rows else WHOLE, seconds, memory))
        return choices

    def _compute(self, work: Work, unit: DividedUnit, share: float) -> float:
        """Of a rank with this share of the features."""
        times = RESIDUAL if unit.moves == "weights" else INNER
        seconds = share * self._mixing(work) + self._elementwise(times, work.elements * share)
        for product in work.products:
            out = unit.by_output.get(product.path)
            if out is None:
                seconds += self._product(product._replace(m=math.ceil(product.m * share)))
            elif out:
                seconds += self._product(product._replace(n=math.ceil(product.n * share)))
            else:
                seconds += self._product(product._replace(k=math.ceil(product.k * share)))
        return self._launched(seconds, work)

    def _launched(self, seconds: float, work: Work) -> float:
        """With the launches of its operations, which dividing leaves as they are; see `Box.finished`."""
        machine = self.box.machine
        launches = machine.learned.compute * 3 * work.operations * machine.device.launch
        return max(seconds, launches) if machine.software.asynchronous else seconds + launches

    def _product(self, product: Product) -> float:
        """Forward, and both gradients."""
        _, m, k, n = product
        each = self.box.product(m, k, n), self.box.product(m, n, k), self.box.product(k, m, n)
        return self.box.machine.learned.compute * sum(each)

    def _mixing(self, work: Work) -> float:
        """Forward and backward of attention, and of products of activations that are written out."""
        box, machine = self.box, self.box.machine
        written = 3 * work.mixing / (box.rate * machine.device.attention)
        fused = (1 + box.attention_backward) * sum(box.scored(*each) for each in work.attention)
        return machine.learned.compute * (written + fused)

    def _elementwise(self, times: float, elements: float) -> float:
        nbytes, device = times * self.size * elements, self.box.machine.device
        seconds = device.elementwise(nbytes, 0.0) if times == RESIDUAL else device.elementwise(0.0, nbytes)
        return self.box.machine.learned.compute * (1 + BACKWARD) * seconds

    def _update(self, elements: float) -> float:
        return elements * update_seconds(self.box.job, self.box.machine)

    def _memory(self, weights: float, activations: float) -> float:
        """Of weights with gradients and the optimizer's state, and of elements that are kept."""
        return (2 + self.box.job.moments) * self.size * weights + self.size * activations

    def _kept(self, work: Work, share: float) -> float:
        rows = self.shards and work.unit is not None and self.units[work.unit].moves == "pair"
        return work.elements * share + work.out / (self.ranks if rows else 1)

    # What moves inside of a divided unit, and on its way out

    def _leaving(self, work: Work, unit: DividedUnit) -> float:
        net, nbytes, box = self.box.network, self.size * work.out, self.box
        if unit.moves == "output":
            return net.all_gather(nbytes, self.line)
        if not (self.shards and unit.moves == "pair"):
            return net.all_reduce(nbytes, self.line)
        if not unit.on_box:
            return net.reduce_scatter(nbytes, self.line) + net.all_gather(nbytes, self.line)
        part, x = nbytes / (box.y * box.z), box.groups["x"]
        across = 2 * net.all_to_all(nbytes / self.ranks, box.groups["y"])
        return net.reduce_scatter(part, x) + net.all_gather(part, x) + across

    def _inside(self, work: Work, unit: DividedUnit) -> float:
        """Key heads that several ranks need; on a box weights over z, sums and gathers of what lies between the
        products over y, and heads over z."""
        net, size, box, total = self.box.network, self.size, self.box, 0.0
        for path, m, _, n in work.products:
            if path in unit.gathered:
                total += net.all_gather(size * m * n, self.line) + net.reduce_scatter(size * m * n, self.line)
        if not (self.shards and unit.on_box):
            return total
        y, z = box.groups["y"], box.groups["z"]
        for path, m, k, n in work.products:
            weight, up = size * k * n / (box.x * box.y), path in unit.inside
            total += 2 * net.all_gather(weight, z) + net.reduce_scatter(weight, z)
            hidden = size * m * (n if up else k) / (box.x * box.z)
            total += net.reduce_scatter(hidden, y) + (1 if up else 2) * net.all_gather(hidden, y)
            if work.mixing or work.attention:
                total += (2 if up else 3) * net.all_to_all(size * m * (n if up else k) / self.ranks, z)
        return total

    # What moves between

    def edge(self, u: int, v: int) -> np.ndarray:
        """Seconds by the choices of both; infinite where v would be given something else than it takes."""
        place, found = self.inputs[v].index(u), np.zeros((len(self.choices[u]), len(self.choices[v])))
        nbytes = self.size * self.work[u].out
        for (i, one), (j, other) in itertools.product(enumerate(self.choices[u]), enumerate(self.choices[v])):
            if isinstance(other.takes, tuple):
                found[i, j] = self._taken(one.gives, other, place, v, nbytes)
            else:
                found[i, j] = self._moving(nbytes, one.gives, other.takes)
        return found * self.box.machine.learned.tensor

    def _taken(self, given: str, choice: UnitChoice, place: int, v: int, nbytes: float) -> float:
        """By what goes on with the tokens of a rank where it is given any: it takes them of what is whole besides."""
        if not (self.shards and self.work[v].by_rows):
            return self._moving(nbytes, given, WHOLE)
        if given != choice.takes[place]:
            return math.inf
        return self.box.network.all_gather(nbytes, self.line) if given == WHOLE and choice.gives == ROWS else 0.0

    def _moving(self, nbytes: float, given: str, takes: str) -> float:
        """Forward and backward; what enters a unit that is divided by tokens around is gathered once more in
        backward, rather than kept."""
        net, box = self.box.network, self.box
        gather = net.all_gather(nbytes, self.line)
        if takes == BOX:
            part, x = nbytes / (box.y * box.z), box.groups["x"]
            seconds = 2 * net.all_gather(part, x) + net.reduce_scatter(part, x)
            seconds += 3 * net.all_to_all(nbytes / self.ranks, box.groups["y"])
            return seconds + (gather if given == WHOLE else 0.0)
        if takes == ENTER:
            return 2 * gather + net.reduce_scatter(nbytes, self.line) if given == ROWS else (
                net.all_reduce(nbytes, self.line))  # fmt: skip
        return (gather if given == ROWS else 0.0) + (gather if takes == PART else 0.0)

    def problem(self, limit: float = math.inf) -> OneHot:
        """Units that share a weight are divided or whole together."""
        costs = [np.array([choice.seconds for choice in choices]) for choices in self.choices]
        memory = [np.array([choice.memory for choice in choices]) for choices in self.choices]
        edges = {(u, v): self.edge(u, v) for v, inputs in enumerate(self.inputs) for u in inputs}
        known = [number for number, each in enumerate(self.work) if each.unit is not None]
        for u, v in itertools.combinations(known, 2):
            one, other = (self.units[self.work[number].unit or 0].parameters for number in (u, v))
            if one & other:
                alike = [[a.divided == b.divided for b in self.choices[v]] for a in self.choices[u]]
                edges[u, v] = edges.get((u, v), 0.0) + np.where(alike, 0.0, math.inf)
        return OneHot(costs, edges, memory, limit)

    def whole(self, best: Sequence[int]) -> tuple[tuple[str, ...], ...]:
        """Paths of the units that these choices leave whole. One that the call did not reach is none of them."""
        pairs = [(work.unit, each[number]) for work, each, number in zip(self.work, self.choices, best)]
        return tuple(self.units[unit].paths for unit, choice in pairs if unit is not None and not choice.divided)
