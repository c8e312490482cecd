"""Seconds and bytes of a choice: what stages compute and move, run through the simulator of its schedule."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from hpctrain.pipeline import Costs
from hpctrain.plan import pipelines, stage_messages
from hpctrain.plan.job import Choice, Job
from hpctrain.plan.machine import Machine
from hpctrain.plan.memory import state_bytes, updated_bytes
from hpctrain.plan.network import Group, Network
from hpctrain.plan.passes import Box, Part, Pass
from hpctrain.shard import split_sizes

PARTS = ("compute", "data", "tensor", "sequence", "expert", "bubble", "optimizer", "reading", "stragglers")


@dataclass(frozen=True)
class Estimate:
    """Of a step; parts are those of the busiest rank of a pipeline, in seconds."""

    seconds: float
    memory: float
    parts: dict[str, float] = field(compare=False)


@dataclass(frozen=True)
class Stage:
    """Seconds of a stage, of a microbatch and of a step's end."""

    forward: Pass
    input_gradient: Pass
    weight_gradient: Pass
    forward_data: float  # ZeRO-2 and -3 communicate with every microbatch
    backward_data: float
    sums: float  # the rest of the sums over the data axis that nothing hides
    sums_tensor: float
    update: float

    @functools.cached_property
    def passes(self) -> tuple[float, float, float]:
        """Of the forward, the input gradient and the weight gradient."""
        forward = self.forward.seconds + self.forward_data
        return forward, self.input_gradient.seconds + self.backward_data, self.weight_gradient.seconds

    @functools.cached_property
    def microbatch(self) -> float:
        return sum(self.passes)

    @functools.cached_property
    def ending(self) -> float:
        return self.sums + self.sums_tensor + self.update


@dataclass(frozen=True)
class Parts:
    """A block with a mixture, where there is one, and one without; the embedding and the head; seconds of the sums over
    z of each block's weights."""

    blocks: tuple[Part, Part]
    embedding: Part
    head: Part
    z_sums: tuple[float, float]


class Estimator:
    """Everything about one job on one machine; what several choices share is computed once."""

    def __init__(self, job: Job, machine: Machine):
        self.job, self.machine = job, machine
        self.network = Network(machine)
        self._parts: dict[tuple, Parts] = {}
        self.stages = functools.lru_cache(1 << 12)(self._stages)
        self.stage = functools.lru_cache(1 << 16)(self._make_stage)
        self.stage_bytes = functools.lru_cache(1 << 16)(self._stage_bytes)
        self.block_elements = functools.cache(self._block_elements)
        self.widths = functools.cache(self._widths)

    def parts(self, choice: Choice) -> Parts:
        """Of a microbatch."""
        distance = choice.pipeline if choice.ring > 1 else 1  # of the boxes of a ring
        shape = choice.algorithm, choice.box, choice.ring, choice.ulysses, choice.expert, choice.expert_tensor
        key = *shape, distance, choice.recompute, self.job.sequences(choice)
        if key not in self._parts:
            box, costs = Box(self.job, self.machine, self.network, choice), self.job.costs

            def kind(dense: bool) -> tuple[Part, float]:
                z_sums = sum(box.weight_sum(e.n_in, e.n_out) for e in costs.linears_of(dense))
                return box.block(choice.recompute, dense), z_sums

            mixed, mixed_sums = kind(False)
            dense, dense_sums = kind(True) if costs.dense_layers else (mixed, mixed_sums)
            self._parts[key] = Parts((mixed, dense), box.embedding(), box.head(), (mixed_sums, dense_sums))
        return self._parts[key]

    # Stages

    def _block_elements(self, dense: bool = False) -> int:
        """Parameters of a block beside those of experts."""
        costs = self.job.costs
        vectors = sum(e.n_out for e in costs.linears_of(dense) if e.bias)
        vectors += costs.norms * costs.width * (2 - costs.rms_norm) + costs.head_norm_elements
        experts = costs.mixture.experts * costs.expert_weights if costs.mixture and not dense else 0
        return costs.block_weights(dense) - experts + vectors

    def elements(self, choice: Choice, layers: tuple[int, int], first: bool, last: bool) -> float:
        """Parameters that a rank holds of a stage of so many blocks with and without a mixture, beside experts'."""
        costs = self.job.costs
        tables = costs.positions * costs.width if first else 0
        if first or last:
            both = first and last and not costs.tied
            tables += costs.vocabulary * costs.width * (2 if both else 1)
        blocks = sum(count * self.block_elements(dense) for count, dense in zip(layers, (False, True)))
        return (blocks + tables) / math.prod(choice.box)

    def expert_elements(self, choice: Choice, layers: tuple[int, int]) -> float:
        """Parameters of experts that a rank holds of such a stage."""
        costs = self.job.costs
        if not costs.mixture:
            return 0.0
        parts = -(-costs.mixture.experts * choice.expert_tensor // choice.expert)  # each 1 / expert_tensor of an expert
        return layers[0] * parts * costs.expert_weights / choice.expert_tensor

    def placement(self, choice: Choice) -> tuple[list[list[int]], int]:
        """The stages of each rank of a pipeline, and its copies of the model."""
        schedule = choice.schedule, choice.pipeline, choice.microbatches, choice.virtual_stages
        return pipelines.placement(*schedule, len(self.job.slices))

    def in_flight(self, choice: Choice) -> list[dict[int, float]]:
        """Of each rank, {stage: microbatches that it holds at once}."""
        schedule = choice.schedule, choice.pipeline, choice.microbatches, choice.virtual_stages
        return pipelines.in_flight(*schedule, len(self.job.slices))

    def layers(self, choice: Choice) -> Sequence[int]:
        """Blocks of each stage."""
        stages = 1 + max(max(own) for own in self.placement(choice)[0])
        return choice.partition or split_sizes(self.job.costs.layers, stages)

    def kinds(self, choice: Choice) -> Sequence[tuple[int, int]]:
        """Blocks of each stage with a mixture, where there is one, and without."""
        return _kinds(choice.partition or self.layers(choice), self.job.costs.dense_layers)

    def whole_microbatch(self, choice: Choice) -> float:
        """Seconds of a microbatch in the whole model, but for communication on the data axis."""
        parts, dense = self.parts(choice), self.job.costs.dense_layers
        blocks = (self.job.costs.layers - dense) * parts.blocks[0].seconds + dense * parts.blocks[1].seconds
        return blocks + parts.embedding.seconds + parts.head.seconds

    def _stages(self, choice: Choice) -> list[Stage]:
        """Every stage of a pipeline; those that are alike are computed once, whatever the schedule."""
        each = [*zip(self.alike(choice), self.kinds(choice))]
        last = len(each) - 1
        return [self.stage(alike, count, s == 0, s == last) for s, (alike, count) in enumerate(each)]

    def homes(self, choice: Choice) -> list[int]:
        """The rank of each stage; the first where several have it."""
        home = {stage: rank for rank, own in reversed([*enumerate(self.placement(choice)[0])]) for stage in own}
        return [home[stage] for stage in range(len(home))]

    def alike(self, choice: Choice) -> list[Choice]:
        """Of each stage, its box and all else that decides its costs."""
        plain = choice._replace(schedule="", virtual_stages=0, partition=())
        return [plain.at(rank) for rank in self.homes(choice)]

    def groups(self, choice: Choice) -> tuple[Group, Group]:
        """The ranks that hold the same weights, and the same experts, which come one after another on their axis."""
        box = math.prod(choice.box)
        copies = Group(choice.replicas * box // choice.expert, choice.expert if choice.expert > 1 else 1)
        return Group(choice.replicas, choice.pipeline * box), copies

    def _make_stage(self, choice: Choice, layers: tuple[int, int], first: bool, last: bool) -> Stage:
        job, device, learned = self.job, self.machine.device, self.machine.learned
        found = self.parts(choice)
        parts = [*zip(found.blocks, layers)] + [(found.embedding, 1)] * first + [(found.head, 1)] * last
        forward, inputs, weights = (
            Pass.total((getattr(part, name), count) for part, count in parts)
            for name in ("forward", "input_gradient", "weight_gradient")
        )
        elements = self.elements(choice, layers, first, last)
        experts, net = self.expert_elements(choice, layers), self.network
        group, copies = self.groups(choice)

        bucket, pieces = self.machine.software.bucket, max(1, sum(layers)) if choice.method == "zero3" else 1

        def over_data(operation, size):
            seconds = 0.0
            for nbytes, ranks in ((size * elements, group), (size * experts, copies)):
                count = max(pieces, math.ceil(nbytes / bucket) if bucket else 1)
                seconds += count * operation(nbytes / count, ranks)
            return seconds * learned.data

        scatter, gather = over_data(net.reduce_scatter, job.comm), over_data(net.all_gather, job.itemsize)
        z_sums = sum(count * each for count, each in zip(layers, found.z_sums)) * learned.tensor
        method, updated, forward_data, backward_data = choice.method, elements + experts, 0.0, 0.0
        once = "weight_gradient" in job.overlap and method not in ("zero2", "zero3") and job.reduce == job.itemsize
        if not once:
            weights = weights._replace(tensor=weights.tensor + z_sums)
        if method == "zero1":
            sums = scatter + gather
        elif method == "zero2":
            sums, backward_data = gather, scatter
        elif method == "zero3":
            sums, forward_data, backward_data = 0.0, gather, gather + scatter
        else:
            sums = over_data(net.all_reduce, job.comm) / max(1, job.average_every)
        if method.startswith("zero"):
            updated = elements / choice.replicas + experts / copies.size
        hidden = self.machine.software.hidden_data
        backward = inputs.seconds + weights.seconds
        # sums run beside the last backward, and gathers of weights beside the next step's first forward
        ahead = gather if method in ("zero1", "zero2") else 0.0
        sums -= min(hidden * (sums - ahead), backward) + min(hidden * ahead, forward.seconds)
        backward_data -= min(hidden * backward_data, backward)
        forward_data -= min(hidden * forward_data, forward.seconds)
        if job.costs.tied and first != last:  # the table's gradient, of both ends of the pipeline
            table = job.comm * job.costs.vocabulary * job.costs.width / math.prod(choice.box)
            sums += 2 * net.message(table, math.prod(choice.box) * (choice.pipeline - 1)) * learned.data
        update = updated * updated_bytes(job) / device.optimizer_rate * learned.optimizer
        return Stage(forward, inputs, weights, forward_data, backward_data, sums, z_sums if once else 0.0, update)

    # Pipelines

    def edges(self, choice: Choice) -> list[float]:
        """Seconds of the message on each edge of the chain of stages."""
        homes, tensor = self.homes(choice), math.prod(choice.box) * choice.ulysses
        boxes = choice.boxes or [choice.box] * choice.pipeline
        ways = [(boxes[a], boxes[b], abs(b - a) * tensor) for a, b in itertools.pairwise(homes)]
        known = {way: stage_messages.seconds(self.job, self.network, choice, *way) for way in set(ways) if way[2]}
        return [known.get(way, 0.0) for way in ways]

    def estimate(self, choice: Choice) -> Estimate:
        """What a step takes with this choice."""
        job, p, m = self.job, choice.pipeline, choice.microbatches
        stages = self.stages(choice)
        local, copies = self.placement(choice)
        if p == 1:
            seconds = sum(m * stage.microbatch + stage.ending for stage in stages)
        else:
            forward, inputs, weights = (list(each) for each in zip(*(stage.passes for stage in stages)))
            costs = Costs(
                forward,
                inputs,
                weights,
                reduce=[stage.sums + stage.sums_tensor for stage in stages],
                update=[stage.update for stage in stages],
                slices=[n / job.costs.context for n in job.slices] or None,
                latency=self.edges(choice),
            )
            seconds = pipelines.makespan(choice.schedule, p, m, choice.virtual_stages, costs, len(job.slices))
        work = [sum(m / copies * stages[s].microbatch + stages[s].ending for s in own) for own in local]
        busiest = local[max(range(p), key=work.__getitem__)]
        return self._told(choice, [stages[s] for s in busiest], m / copies, seconds)

    def _told(self, choice, own, count, seconds) -> Estimate:
        parts = dict.fromkeys(PARTS, 0.0)
        for stage in own:
            passes = (stage.forward, stage.input_gradient, stage.weight_gradient)
            parts["compute"] += count * sum(each.compute for each in passes)
            parts["tensor"] += count * sum(each.tensor for each in passes) + stage.sums_tensor
            parts["sequence"] += count * sum(each.sequence for each in passes)
            parts["expert"] += count * sum(each.expert for each in passes)
            parts["data"] += count * (stage.forward_data + stage.backward_data) + stage.sums
            parts["optimizer"] += stage.update
        idle = seconds - sum(parts.values())
        parts["bubble"] = idle if idle > 1e-9 * seconds else 0.0  # else rounding
        parts["reading"] = self.reading(choice)
        late = self.machine.errors.noise * math.sqrt(2 * math.log(choice.ranks))
        parts["stragglers"] = late * (seconds + parts["reading"])
        return Estimate(seconds + parts["reading"] + parts["stragglers"], self.memory(choice), parts)

    def reading(self, choice: Choice) -> float:
        """Seconds of a step's samples: their tokens are read, and copied once as int64 ids and targets."""
        device, samples = self.machine.device, self.job.sequences(choice) * choice.microbatches
        tokens = samples * self.job.costs.context / (choice.ring * choice.ulysses)
        read = 8 * tokens / device.reading if device.reading else 0.0
        return samples * device.sample + read + 4 * 8 * tokens / device.bandwidth

    # Memory

    def memory(self, choice: Choice) -> float:
        """Bytes of the rank that needs the most."""
        in_flight, (local, _) = self.in_flight(choice), self.placement(choice)
        counts, alike = self.kinds(choice), self.alike(choice)
        last = len(counts) - 1
        each = [self.stage_bytes(alike[s], count, s == 0, s == last) for s, count in enumerate(counts)]
        working = {on: [self.working_bytes(on, ends) for ends in (False, True)] for on in {*alike}}
        return self.used(
            max(
                sum(each[s][0] + active.get(s, 0) * each[s][1] for s in own) + working[alike[own[0]]][last in own]
                for own, active in zip(local, in_flight)
            )
        )

    def least_states(self, choice: Choice, layers: int) -> float:
        """Bytes of the parameters of a rank that has so many layers, at least."""
        dense = min(layers, self.job.costs.dense_layers)
        return self.states(choice, (layers - dense, dense), False, False)

    def kept(self, choice: Choice) -> float:
        """Bytes that a block keeps of a microbatch, at least."""
        return min(block.kept for block in self.parts(choice).blocks)

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
        device = self.machine.device
        return device.reserved + allocated * (1 + device.slack) * self.machine.learned.memory

    def states(self, choice: Choice, layers: tuple[int, int], first: bool, last: bool) -> float:
        """Bytes of a stage's parameters, with gradients and all that the optimizer keeps."""
        copies = choice.replicas * math.prod(choice.box) // choice.expert
        states = self.elements(choice, layers, first, last) * state_bytes(self.job, choice.method, choice.replicas)
        return states + self.expert_elements(choice, layers) * state_bytes(self.job, choice.method, copies)

    def _stage_bytes(self, choice: Choice, layers: tuple[int, int], first: bool, last: bool) -> tuple[float, float]:
        """States of a stage's parameters, and what each of its microbatches keeps."""
        parts = self.parts(choice)
        kept = sum(count * block.kept for count, block in zip(layers, parts.blocks))
        kept += first * parts.embedding.kept + last * parts.head.kept
        return self.states(choice, layers, first, last), kept

    def working_bytes(self, choice: Choice, last: bool) -> float:
        """What a rank needs besides while it computes; with ZeRO-3 two blocks' weights are whole."""
        parts, whole = self.parts(choice), 0.0
        if choice.method == "zero3":
            elements = self.block_elements() / math.prod(choice.box) + self.expert_elements(choice, (1, 0))
            whole = 2 * self.job.itemsize * elements
        return whole + max(*(block.working for block in parts.blocks), parts.head.working if last else 0.0)


@functools.lru_cache(1 << 10)
def _kinds(layers: tuple[int, ...], dense: int) -> list[tuple[int, int]]:
    found = []
    for count in layers:
        without = min(count, dense)
        dense -= without
        found.append((count - without, without))
    return found
