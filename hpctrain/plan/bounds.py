"""Seconds that choices take at least, for a search that leaves out what cannot be the best.

A bound counts work that some rank does one after another; how long it waits, only a simulation tells:

    grid      of the mean rank: floating-point operations at the rate of products, what the others read and write, and
              the bytes of the tensor axes that nothing hides, without any latency, in one microbatch
    layout    m (blocks + embedding + head) / p: the mean rank's work, at most the busiest's, with the least
              recomputation that may fit by what its input and its products keep alone
    way       the same by all that its parts keep, and the bytes of the data axis that nothing hides
    choice    of every rank, what must be done before its first task, all its work, and what must follow its last task

A grid's two bounds hold for all its numbers of microbatches: m times what takes a + b / m seconds is at least a + b.
Measured tables need not be so: with them bytes count nothing, and the layout's bound is that of its own microbatches.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator

from hpctrain.choices import PLANE_PRODUCTS
from hpctrain.plan.estimator import Estimator
from hpctrain.plan.job import Choice
from hpctrain.plan.network import Group
from hpctrain.plan.passes import BACKWARD, INNER, RESIDUAL, update_seconds
from hpctrain.plan.space import ZERO, choices, expert_ranks, recomputations, ways

SPLIT = "zb", "dualpipe"  # how schedules begin whose backwards are split
ROUNDING = 1 - 1e-9  # bounds are sums in another order than what they bound


class Bounds:
    """Of one job's choices on so many ranks."""

    def __init__(self, estimator: Estimator, given: Choice, ranks: int):
        self.estimator, self.job, self.given = estimator, estimator.job, given
        self.tables = bool(estimator.machine.measured)
        self.recomputed = recomputations(self.job, given)
        self.in_flight, self._orders = functools.cache(self._find_in_flight), functools.cache(self._find_orders)
        self._states = functools.lru_cache(1 << 8)(self._least_states)
        self._late = 1 + estimator.machine.errors.noise * math.sqrt(2 * math.log(ranks))

    def grid(self, grid: Choice) -> float:
        """Whatever else is chosen."""
        machine, job = self.estimator.machine, self.job
        tokens = job.batch * job.costs.context / (grid.data * grid.ring * grid.ulysses)  # of a replica's sequence rank
        compute = tokens * (self._flops / self._rate + self._beside) / math.prod(grid.box)
        compute = (compute + self._operands(grid, tokens / grid.z)) * machine.learned.compute
        tensor = 0.0 if self.tables else self._bytes(grid, tokens / grid.z) * machine.learned.tensor
        hidden = machine.software.hidden_tensor
        return self._least(grid, (compute + max(0.0, 1 - hidden) * tensor) / grid.pipeline)

    @functools.cached_property
    def _rate(self) -> float:
        machine, job = self.estimator.machine, self.job
        return machine.peak_of(job.compute, job.matmul) * machine.device.product

    @functools.cached_property
    def _beside(self) -> float:
        """Seconds of a token's attention and element-wise operations in the blocks, forward and backward."""
        costs, machine, software = self.job.costs, self.estimator.machine, self.estimator.machine.software
        rate, score = machine.device.attention_of(costs.context)
        scores = 4 * costs.attention_width * costs.keys * software.attended / (self._rate * rate)
        scores += self.job.heads * costs.keys * software.attended * score
        scores += self.job.heads * costs.keys * software.score_bytes / machine.device.bandwidth
        linears = [
            *costs.linears_of() * (costs.layers - costs.dense_layers),
            *costs.linears_of(True) * costs.dense_layers,
        ]
        inner = INNER * self.job.itemsize * sum(e.n_out if e.to_inner else e.n_in for e in linears)
        residual = RESIDUAL * self.job.itemsize * 2 * costs.norms * costs.width * costs.layers
        elementwise = (1 + BACKWARD) * machine.device.elementwise(residual, inner)
        return costs.layers * scores * (3.0 if software.score_bytes else 3.5) + elementwise

    @functools.cached_property
    def _flops(self) -> float:
        """Of the products of a token's forward and backward, but for scores and routers."""
        costs = self.job.costs
        dense = costs.dense_layers
        blocks = (costs.layers - dense) * (costs.block_weights(active=True) - costs.router_weights)
        return 6.0 * (blocks + dense * costs.block_weights(dense=True) + costs.vocabulary * costs.width)

    @functools.cached_property
    def _widths(self) -> dict[bool, tuple[int, int]]:
        """{into the inner layout: (input, output) features of all linear layers together}, and the elements."""
        costs = self.job.costs
        dense = costs.dense_layers
        linears = [*costs.linears_of() * (costs.layers - dense), *costs.linears_of(True) * dense]
        found = {
            way: (sum(e.n_in for e in linears if e.to_inner == way), sum(e.n_out for e in linears if e.to_inner == way))
            for way in (True, False)
        }
        n_in, n_out = found[True]
        return found | {True: (n_in + costs.width, n_out + costs.vocabulary)}

    def _operands(self, grid: Choice, rows: float) -> float:
        """Seconds in which the products of all linear layers, three each, read and write what is not weights."""
        x, y, _ = grid.box
        (to_in, to_out), (from_in, from_out) = self._widths[True], self._widths[False]
        numbers = 3 * rows * (to_in / y + to_out / x + from_in / x + from_out / y)
        return self.job.itemsize * numbers / self.estimator.machine.device.operand_rate

    def _bytes(self, grid: Choice, rows: float) -> float:
        """Seconds in which the tensor axes move the operands of all linear layers, three products each."""
        net, size = self.estimator.network, self.job.itemsize
        x, y, z = grid.box
        over = {"x": Group(x, y * z), "y": Group(y, z), "z": Group(z, 1)}
        pace = {axis: net.seconds_per_byte(group) * (1 - 1 / group.size) for axis, group in over.items()}
        (to_in, to_out), (from_in, from_out) = self._widths[True], self._widths[False]
        if grid.algorithm in PLANE_PRODUCTS:  # of weights and of z nothing is counted
            return 3 * size * rows * (to_out + from_out) / x * pace["y"]
        gathered = 3 * to_in / y * pace["x"] + 2 * to_out / x * pace["y"]
        gathered += 3 * from_in / x * pace["y"] + 2 * from_out / y * pace["x"]
        return size * rows * gathered

    def layouts(self, grid: Choice) -> float:
        """Of the layouts of a grid, which is the one with a single microbatch."""
        return 0.0 if self.tables else min(map(self._work, ways(self.job, self.given, grid)))

    def layout(self, layout: Choice) -> float:
        """Whatever schedule, recomputation and way to keep replicas are chosen."""
        spread = (layout._replace(expert=expert) for expert in expert_ranks(self.job, self.given, layout))
        work = min(map(self.estimator.whole_microbatch, spread))
        return self._least(layout, self.estimator.full_microbatches(layout) * work / layout.pipeline)

    def lean(self, layout: Choice) -> Choice | None:
        """A layout with the least recomputation with which any of its choices may fit into memory; None where none may.
        What their parts take is not known yet."""
        for recompute in self.recomputed:
            if self.memory(layout, recompute) <= self.estimator.machine.device.memory:
                return layout._replace(recompute=recompute)
        return None

    def memory(self, layout: Choice, recompute: str) -> float:
        """Bytes that the fullest rank needs whatever else is chosen, as far as is known without its parts."""
        fewest, active = self.in_flight(layout.pipeline, layout.microbatches)
        states = self._states(layout._replace(microbatches=1), fewest)
        memory = self.estimator.memory
        return memory.used(states + memory.least_activations(layout, recompute, active)) * ROUNDING

    def _least_states(self, grid: Choice, layers: int) -> float:
        return min(self.estimator.memory.least_states(way, layers) for way in ways(self.job, self.given, grid))

    def way(self, way: Choice) -> float:
        """Whatever schedule is chosen, with the least recomputation that may fit into memory; infinite without any."""
        memory, (fewest, active) = self.estimator.memory, self.in_flight(way.pipeline, way.microbatches)
        for recompute in self.recomputed:
            choice = way._replace(recompute=recompute)
            need = memory.least_states(choice, fewest) + active * memory.kept(choice)
            if memory.used(need) * ROUNDING <= self.estimator.machine.device.memory:
                return max(self._work(choice), self._waiting(choice))
        return math.inf

    def _find_in_flight(self, pipeline: int, microbatches: int) -> tuple[int, float]:
        """The fewest layers that a rank has, and the layers' microbatches that the fullest rank holds at once, the
        least over all schedules and cuts."""
        job, given, estimator = self.job, self.given, self.estimator
        fewest, least = job.costs.layers, math.inf
        for choice in choices(job, given, given._replace(pipeline=pipeline, microbatches=microbatches)):
            if choice.recompute == self.recomputed[0]:
                counts, (local, _) = estimator.layers(choice), estimator.placement(choice)
                active = estimator.in_flight(choice)
                fewest = min(fewest, *(sum(counts[s] for s in own) for own in local))
                each = (sum(at.get(s, 0) * counts[s] for s in own) for own, at in zip(local, active))
                least = min(least, max(each))
        return fewest, least

    def _work(self, way: Choice) -> float:
        """The mean rank's. Where ranks share cores, those that wait lend theirs, but all have work for as long as the
        mean rank's rows take."""
        each, ending = self._kept_alike(way)
        work = self.estimator.full_microbatches(way) * (self.estimator.whole_microbatch(way) + each) + ending
        shared = max(1.0, self.estimator.evenness(way) / self.estimator.machine.share)
        exchanges = self.estimator.exchanges(way) if way.pipeline == 1 else 1.0
        return self._least(way, shared * work / way.pipeline, exchanges)

    def _waiting(self, way: Choice) -> float:
        """The bound of choices for blocks alone, with the schedule and cut for which that is the least."""
        parts, layers, m = self.estimator.parts(way), self.job.costs.layers, self.estimator.full_microbatches(way)
        forward = min(block.forward.seconds for block in parts.blocks)
        block = min(block.seconds for block in parts.blocks)
        each, ending = (part * self._in_blocks / layers for part in self._kept_alike(way))
        return self._least(
            way,
            min(
                max(
                    before * forward + m * own * (block + each) + m * last * parts.head.seconds
                    + max(own * ending, after * (block - forward))
                    for before, own, after, last in ranks
                )
                for ranks in self._orders(way.pipeline)
            ),
        )  # fmt: skip

    def _find_orders(self, pipeline: int) -> list[list[tuple[int, int, int, bool]]]:
        """For every schedule and cut, of the ranks that may wait the longest: layers before its first stage, its own,
        those that backwards pass after it, and whether the last stage is its own."""
        job, given, estimator = self.job, self.given, self.estimator
        found = []
        one = given._replace(pipeline=pipeline, microbatches=1)  # with which all schedules are allowed
        for choice in choices(job, given, one):
            local, copies = estimator.placement(choice)
            if choice.recompute == self.recomputed[0] and copies == 1:
                counts = estimator.layers(choice)
                before = [0, *itertools.accumulate(counts)]
                passed = 0 if choice.schedule.startswith(SPLIT) else 1
                ranks = {
                    (before[min(own)], sum(counts[s] for s in own), passed * before[min(own)], len(counts) - 1 in own)
                    for own in local
                }
                found.append([a for a in ranks if not any(a != b and all(map(operator.le, a, b)) for b in ranks)])
        return found or [[(0, 0, 0, False)]]

    @functools.cached_property
    def _in_blocks(self) -> float:
        """The part of all parameters, at least, that blocks have."""
        costs, estimator = self.job.costs, self.estimator
        layers = costs.layers - costs.dense_layers, costs.dense_layers
        blocks, whole = (estimator.elements(self.given, layers, end, end) for end in (False, True))
        return blocks / whole

    def _kept_alike(self, way: Choice) -> tuple[float, float]:
        """Seconds of a microbatch, and of a step's end, in sums and gathers over replicas that nothing hides and in the
        update, of the whole pipeline."""
        if way.method not in ZERO:
            return 0.0, 0.0
        estimator, job, machine = self.estimator, self.job, self.estimator.machine
        costs = job.costs
        layers = costs.layers - costs.dense_layers, costs.dense_layers
        elements = estimator.elements(way, layers, True, True), estimator.expert_elements(way, layers)
        groups = estimator.groups(way)
        reduce, gather = job.comm, job.itemsize
        each, once = {
            "ddp": (0, 2 * reduce), "zero1": (0, reduce + gather), "zero2": (reduce, gather),
            "zero3": (reduce + 2 * gather, 0),
        }[way.method]  # fmt: skip
        pace, update = 0.0, 0.0
        for count, group in zip(elements, groups):
            pace += count * (1 - 1 / group.size) * estimator.network.seconds_per_byte(group)
            update += count / (1 if way.method == "ddp" else group.size)
        pace *= 0.0 if self.tables else max(0.0, 1 - machine.software.hidden_data) * machine.learned.data
        update *= update_seconds(job, machine)
        return pace * each, pace * once + update

    def choice(self, choice: Choice) -> float:
        """The most over its pipeline's ranks."""
        local, copies = self.estimator.placement(choice)
        if copies > 1:
            return 0.0  # they share the microbatches in a way that the schedule alone knows
        stages = self.estimator.stages(choice)
        edges = [*self.estimator.edges(choice), 0.0]
        # the first microbatch reaches a stage through all before it, and the last gradient goes back through them;
        # where backwards are split, a rank's last task may be a weight's gradient, which nothing follows
        splits = choice.schedule.startswith(SPLIT)
        reached, followed = [0.0], [0.0]
        for stage, edge in zip(stages, edges):
            forward, *backward = stage.passes
            reached.append(reached[-1] + forward + edge)
            followed.append(followed[-1] + (0.0 if splits else sum(backward) + edge))
        updates = self.estimator.updates(stages)
        endings = [sum(stages[s].all_sums + updates[s] for s in own) for own in local]
        home = next(rank for rank, own in enumerate(local) if 0 in own)
        last = 0.0 if splits else endings[home]
        return max(
            self._least(
                choice,
                reached[min(own)]
                + self.estimator.full_microbatches(choice) * sum(stages[s].microbatch for s in own)
                + max(ending, followed[min(own)] + last),
            )
            for own, ending in zip(local, endings)
        )

    def _least(self, choice: Choice, seconds: float, exchanges: float = 1.0) -> float:
        estimator = self.estimator
        share, delay = estimator.machine.share, estimator.delay(choice, exchanges)  # ranks that wait lend their share
        return ((share * seconds + estimator.reading(choice)) * self._late + delay) * ROUNDING
