"""Bytes that a rank needs."""

from __future__ import annotations

import functools
import math

from hpctrain.choices import PLANE_PRODUCTS
from hpctrain.plan.division import Division
from hpctrain.plan.job import Choice, Job
from hpctrain.plan.machine import Machine


def state_bytes(job: Job, method: str, data: int) -> float:
    """Of one parameter: weights, gradients, masters and the optimizer's numbers; see data_parallel/README.md."""
    masters: float = (job.master if job.master != job.itemsize else 0) + job.moments * job.master + job.ema
    weights: float = job.itemsize
    gradients: float = job.reduce
    if method in ("zero1", "zero2", "zero3"):
        masters /= data
    if method in ("zero2", "zero3"):
        gradients /= data
    if method == "zero3":
        weights /= data
    return weights + gradients + masters


def allocatable(machine: Machine) -> float:
    """Bytes that a rank may allocate, beside what is reserved and what the allocator wastes; below 0 where already that
    is too much. The inverse of `Memory.used`."""
    device = machine.device
    return (device.memory - device.reserved) / (1 + device.slack) / machine.learned.memory


class Memory:
    """Of the choices of one job."""

    def __init__(self, division: Division):
        self.division, self.job = division, division.job
        self.stage = functools.lru_cache(1 << 16)(self._stage)
        self.widths = functools.cache(self._widths)

    def of(self, choice: Choice) -> float:
        """Bytes of the rank that needs the most."""
        return self.used(self.allocated(choice))

    def allocated(self, choice: Choice) -> float:
        """The same, of what the rank allocates."""
        in_flight, (local, _) = self.division.in_flight(choice), self.division.placement(choice)
        counts, alike = self.division.kinds(choice), self.division.alike(choice)
        last = len(counts) - 1
        each = [self.stage(alike[s], count, s == 0, s == last) for s, count in enumerate(counts)]
        working = {on: [self.working(on, ends) for ends in (False, True)] for on in {*alike}}
        tables = {on: self.division.parts(on).embedding.working for on in {*alike}}
        return max(
            sum(each[s][0] for s in own)
            + max(
                sum(active.get(s, 0) * each[s][1] for s in own) + working[alike[own[0]]][last in own],
                tables[alike[0]] if 0 in own else 0.0,  # when the first backward ends, blocks keep nothing
            )
            for own, active in zip(local, in_flight)
        )

    def least_states(self, choice: Choice, layers: int) -> float:
        """Bytes of the parameters of a rank that has so many layers, at least."""
        dense = min(layers, self.job.costs.dense_layers)
        return self.states(choice, (layers - dense, dense), False, False)

    def kept(self, choice: Choice) -> float:
        """Bytes that a block keeps of a microbatch, at least."""
        return min(block.kept for block in self.division.parts(choice).blocks)

    def least_activations(self, layout: Choice, recompute: str, in_flight: float) -> float:
        """Bytes of the activations of the rank that holds so many layers' microbatches, or of the one with the head,
        at least, without a look at their parts: scores and experts come on top."""
        job = self.job
        tokens = job.sequences(layout) * job.costs.context / (layout.ring * layout.ulysses) / math.prod(layout.box)
        kept, working = self.widths(recompute)
        head = job.costs.vocabulary * (2 * max(job.itemsize, 4) + job.itemsize)
        return tokens * max(job.itemsize * (in_flight * kept + working), head)

    def _widths(self, recompute: str) -> tuple[int, int]:
        """Numbers of a token that a block keeps, and needs while it is computed."""
        costs = self.job.costs
        kinds = [costs.linears_of(dense) for dense in (False, True)]
        kept = min(sum(e.n_out if e.to_inner else e.n_in for e in kind) for kind in kinds)
        kept += 2 * costs.norms * costs.width
        working = 2 * min(max(e.n_out for e in kind) for kind in kinds)
        return (costs.width, working + kept) if recompute == "block" else (kept, working)

    def used(self, allocated: float) -> float:
        """Bytes that a rank needs for so many."""
        machine = self.division.machine
        return machine.device.reserved + allocated * (1 + machine.device.slack) * machine.learned.memory

    def states(self, choice: Choice, layers: tuple[int, int], first: bool, last: bool) -> float:
        """Bytes of a stage's parameters, with gradients, all that the optimizer keeps, and copies to be saved."""
        copies = choice.replicas * math.prod(choice.box) // choice.expert
        states = self.division.elements(choice, layers, first, last) * self._state(choice, choice.replicas)
        return states + self.division.expert_elements(choice, layers) * self._state(choice, copies)

    def _state(self, choice: Choice, copies: int) -> float:
        return state_bytes(self.job, choice.method, copies) + self._saved(choice, copies)

    def _saved(self, choice: Choice, copies: int) -> float:
        """Of a parameter, its part of the copies from which a checkpoint is written while training goes on."""
        job = self.job
        if not (job.background and self.division.machine.on_host):
            return 0.0
        # each replica saves its own with local SGD, the first one all with ddp in several types
        whole = choice.method == "local_sgd" or (choice.method == "ddp" and job.mixed)
        return (job.master * (1 + job.moments) + job.ema) / (1 if whole else job.servers or copies)

    def _stage(self, choice: Choice, layers: tuple[int, int], first: bool, last: bool) -> tuple[float, float]:
        """States of a stage, with gradients whose sums over z are put off, and what each of its microbatches keeps."""
        parts = self.division.parts(choice)
        kept = sum(count * block.kept for count, block in zip(layers, parts.blocks))
        kept += first * parts.embedding.kept + last * parts.head.kept
        return self.states(choice, layers, first, last) + self._deferred(choice, layers, last), kept

    def _deferred(self, choice: Choice, layers: tuple[int, int], last: bool) -> float:
        """Bytes of the sums over microbatches of a rank's part of gradients that are to be summed over z."""
        on_box = choice.z > 1 and choice.algorithm not in PLANE_PRODUCTS
        if not (on_box and choice.microbatches > 1 and self.division.sums_once(choice)):
            return 0.0
        costs = self.job.costs
        blocks = sum(
            count * sum(each.n_in * each.n_out for each in costs.linears_of(dense))
            for count, dense in zip(layers, (False, True))
        )
        return self.job.itemsize * (blocks + last * costs.vocabulary * costs.width) / (choice.x * choice.y)

    def working(self, choice: Choice, last: bool) -> float:
        """What a rank needs besides while it computes; with ZeRO-3 two blocks' weights are whole."""
        parts, whole = self.division.parts(choice), 0.0
        if choice.method == "zero3":
            experts = self.division.expert_elements(choice, (1, 0))
            whole = 2 * self.job.itemsize * (self.division.block_elements() / math.prod(choice.box) + experts)
        return whole + max(*(block.working for block in parts.blocks), parts.head.working if last else 0.0)
