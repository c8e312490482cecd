"""Seconds of a choice: what stages compute and move, run through the simulator of its schedule."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, field, replace

from hpctrain.pipeline import Costs
from hpctrain.plan import pipelines, stage_messages
from hpctrain.plan.division import Division, Parts
from hpctrain.plan.job import Choice, Job
from hpctrain.plan.machine import Machine
from hpctrain.plan.memory import Memory
from hpctrain.plan.part import Part, Pass
from hpctrain.plan.passes import update_seconds
from hpctrain.plan.replicas import over_replicas, updated

PARTS = ("compute", "data", "tensor", "sequence", "expert", "bubble", "optimizer", "reading", "stragglers")


@dataclass(frozen=True)
class Estimate:
    """Of a step; parts are those of one rank of a pipeline, in seconds."""

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
    sums_sequence: float
    sums_tensor: float
    update: float
    sums_pipeline: float = 0.0  # over ranks of the pipeline that hold the same weights

    @functools.cached_property
    def passes(self) -> tuple[float, float, float]:
        """Of the forward, the input gradient and the weight gradient."""
        forward = self.forward.seconds + self.forward_data
        return forward, self.input_gradient.seconds + self.backward_data, self.weight_gradient.seconds

    @property
    def all_passes(self) -> tuple[Pass, Pass, Pass]:
        return self.forward, self.input_gradient, self.weight_gradient

    @property
    def over_data(self) -> float:
        """Of a microbatch, on the data axis."""
        return self.forward_data + self.backward_data

    @functools.cached_property
    def computing(self) -> float:
        """Of a microbatch, products and element-wise operations."""
        return sum(each.compute for each in self.all_passes)

    @functools.cached_property
    def microbatch(self) -> float:
        return sum(self.passes)

    @functools.cached_property
    def all_sums(self) -> float:
        """Of gradients, at a step's end."""
        return self.sums + self.sums_sequence + self.sums_tensor + self.sums_pipeline

    @functools.cached_property
    def ending(self) -> float:
        return self.all_sums + self.update


class Estimator(Division):
    """Seconds and bytes of one job on one machine; what several choices share is computed once."""

    def __init__(self, job: Job, machine: Machine):
        super().__init__(job, machine)
        self.memory = Memory(self)
        self.stages = functools.lru_cache(1 << 12)(self._stages)
        self.stage = functools.lru_cache(1 << 16)(self._make_stage)
        self.idle = functools.lru_cache(1 << 16)(self._make_idle)

    # Stages

    def whole_microbatch(self, choice: Choice) -> float:
        """Seconds of a microbatch in the whole model, but for communication on the data axis."""
        return sum(count * part.seconds for part, count in self._whole_model(choice))

    def exchanges(self, choice: Choice) -> float:
        """Of a step on a rank that has the whole model, but for microbatches without rows."""
        each = sum(count * part.exchanges for part, count in self._whole_model(choice))
        return 1 + self.full_microbatches(choice) * each

    def _whole_model(self, choice: Choice) -> list[tuple[Part, int]]:
        """Its parts, and how often it has each."""
        found, dense = self.parts(choice), self.job.costs.dense_layers
        return [*zip(found.blocks, (self.job.costs.layers - dense, dense)), (found.embedding, 1), (found.head, 1)]

    def delay(self, choice: Choice, exchanges: float) -> float:
        """Seconds by which chance delays a step that has so many exchanges."""
        return self.machine.device.delay * math.sqrt(exchanges) if choice.ranks > 1 else 0.0

    def _stages(self, choice: Choice) -> list[Stage]:
        """Every stage of a pipeline; those that are alike are computed once, whatever the schedule."""
        stages = [self.stage(*each) for each in self._each_stage(choice)]
        for s, seconds in self._sums_over_holders(choice).items():
            stages[s] = replace(stages[s], sums_pipeline=seconds)
        return stages

    def _sums_over_holders(self, choice: Choice) -> dict[int, float]:
        """{stage: seconds in which two ranks of the pipeline that hold the same weights send each other their
        gradients}: all of a stage, where two copies of the model go both ways; else the table of tied ends."""
        if choice.pipeline == 1:
            return {}
        job, (local, copies), homes = self.job, self.placement(choice), self.homes(choice)
        table = job.costs.tied * job.costs.vocabulary * job.costs.width / math.prod(choice.box)
        shared: dict[int, tuple[float, int]] = {}  # elements, and their distance on the pipeline axis
        if copies > 1:
            for s, (alike, count, first, last) in enumerate(self._each_stage(choice)):
                one, other = (rank for rank, own in enumerate(local) if s in own)
                elements = self.elements(alike, count, first, last) + self.expert_elements(alike, count)
                shared[s] = elements - last * table, other - one  # one rank has both ends, with one table
        elif table and homes[0] != homes[-1]:
            shared = dict.fromkeys((0, len(homes) - 1), (table, homes[-1] - homes[0]))
        spread = job.servers or (choice.replicas if choice.method.startswith("zero") else 1)
        return {
            s: self.network.message(job.reduce * elements / spread, self._distance(choice, distance))
            for s, (elements, distance) in shared.items()
        }

    def _distance(self, choice: Choice, apart: int) -> int:
        """Of ranks so far apart on the pipeline axis; that of neighbours where a node has the whole pipeline."""
        stride = math.prod(choice.box) * choice.ulysses
        return stride * (min(1, apart) if choice.pipeline * stride <= self.machine.node else apart)

    def _each_stage(self, choice: Choice) -> list[tuple[Choice, tuple[int, int], bool, bool]]:
        each = [*zip(self.alike(choice), self.kinds(choice))]
        last = len(each) - 1
        return [(alike, count, s == 0, s == last) for s, (alike, count) in enumerate(each)]

    def _passes(
        self, choice: Choice, found: Parts, layers: tuple[int, int], first: bool, last: bool
    ) -> tuple[Pass, Pass, Pass]:
        """Forward, input gradient and weight gradient, this with its sum over z where that is not put off."""
        parts = [*zip(found.blocks, layers)] + [(found.embedding, 1)] * first + [(found.head, 1)] * last
        forward, inputs, weights = (
            Pass.total((getattr(part, name), count) for part, count in parts)
            for name in ("forward", "input_gradient", "weight_gradient")
        )
        if not self.sums_once(choice):
            weights = weights._replace(tensor=weights.tensor + self._z_sums(found, layers, last))
        return forward, inputs, weights

    def _z_sums(self, found: Parts, layers: tuple[int, int], last: bool) -> float:
        return sum(count * each for count, each in zip((*layers, last), found.z_sums)) * self.machine.learned.tensor

    def _make_idle(self, choice: Choice, layers: tuple[int, int], first: bool, last: bool) -> Pass:
        """What a microbatch takes a rank that has none of its rows: its gradients are zeros, which are added."""
        found = self.parts(choice, empty=True)
        return Pass.total((each, 1) for each in self._passes(choice, found, layers, first, last))

    def _make_stage(self, choice: Choice, layers: tuple[int, int], first: bool, last: bool) -> Stage:
        found, hidden = self.parts(choice), self.machine.software.hidden_data
        forward, inputs, weights = self._passes(choice, found, layers, first, last)
        elements, experts = self.elements(choice, layers, first, last), self.expert_elements(choice, layers)
        over = over_replicas(self, choice, elements, experts, sum(layers))

        def exposed(seconds: float, beside: float) -> float:
            return seconds - min(hidden * seconds, beside)

        # sums run beside the last backward, and gathers of weights beside the next step's first forward
        backward = inputs.seconds + weights.seconds
        return Stage(
            forward, inputs, weights, exposed(over.forward, forward.seconds), exposed(over.backward, backward),
            sums=exposed(over.sums, backward) + exposed(over.gathers, forward.seconds) + over.after,
            sums_sequence=exposed(over.inside, backward),
            sums_tensor=self._z_sums(found, layers, last) if self.sums_once(choice) else 0.0,
            update=updated(self, choice, elements, experts) * update_seconds(self.job, self.machine),
        )  # fmt: skip

    # Pipelines

    def edges(self, choice: Choice) -> list[float]:
        """Seconds of the message on each edge of the chain of stages."""
        boxes = choice.boxes or [choice.box] * choice.pipeline
        ends = itertools.pairwise(self.homes(choice))
        ways = [(boxes[a], boxes[b], self._distance(choice, abs(b - a))) for a, b in ends]
        known = {way: stage_messages.seconds(self.job, self.network, choice, *way) for way in set(ways) if way[2]}
        return [known.get(way, 0.0) for way in ways]

    def updates(self, stages: list[Stage]) -> list[float]:
        """Seconds of each stage's update beside what other stages do: none where ranks share cores, as all update at
        once, after they have summed the gradient's norm."""
        return [0.0 if self.machine.share < 1 else stage.update for stage in stages]

    def estimate(self, choice: Choice, rank: int | None = None) -> Estimate:
        """What a step takes with this choice, by the parts of this rank of a pipeline, by default the busiest."""
        p, m = choice.pipeline, self.full_microbatches(choice)
        stages = self.stages(choice)
        local, copies = self.placement(choice)
        # of those that some replicas have less of, or nothing
        empty = choice.microbatches - m
        none = 1 - self.evenness(choice) if self.machine.share < 1 else 0.0
        idle = [Pass()] * len(stages)
        if empty or none:
            idle = [self.idle(*each) for each in self._each_stage(choice)]
        updates = self.updates(stages)
        if p == 1:
            seconds = sum(
                m * stage.microbatch + empty * (rest.seconds + stage.over_data) + stage.all_sums + update
                for stage, rest, update in zip(stages, idle, updates)
            )
        else:
            seconds = self._pipelined(choice, stages)
        work = [sum(m / copies * stages[s].microbatch + stages[s].ending for s in own) for own in local]
        own = local[max(range(p), key=work.__getitem__) if rank is None else rank]
        if self.machine.share < 1:  # ranks that wait, or have no rows, lend their core to others
            count = choice.microbatches / copies
            full = [count * stage.microbatch + stage.all_sums for stage in stages]
            less = [count * none * max(0.0, s.computing - rest.compute) for s, rest in zip(stages, idle)]
            whole = self._pipelined(choice, stages, self.machine.share) if p > 1 else sum(full)
            seconds = max(whole * (1 - sum(less) / sum(full)), self.machine.share * seconds)
            seconds += sum(stages[s].update for own in local for s in own) / p
        return self._reported(choice, [(stages[s], idle[s]) for s in own], m / copies, empty, seconds)

    def _pipelined(self, choice: Choice, stages: list[Stage], share: float = 1.0) -> float:
        """Seconds of a pipeline's step, where ranks have such a share of a core."""
        forward, inputs, weights = (list(each) for each in zip(*(stage.passes for stage in stages)))
        costs = Costs(
            forward,
            inputs,
            weights,
            reduce=[stage.all_sums for stage in stages],
            update=self.updates(stages),
            slices=[n / self.job.costs.context for n in self.job.slices] or None,
            latency=self.edges(choice),
        )
        order = choice.schedule, choice.pipeline, choice.microbatches, choice.virtual_stages
        return pipelines.makespan(*order, costs, len(self.job.slices), share)

    def _reported(self, choice, own, count, empty, seconds) -> Estimate:
        parts = dict.fromkeys(PARTS, 0.0)
        exchanges = 1.0  # a step ends with one of all ranks, of the gradient's norm
        for stage, idle in own:
            work = Pass.total([*((each, count) for each in stage.all_passes), (idle, empty)])
            exchanges += work.exchanges
            parts["compute"] += work.compute
            parts["tensor"] += work.tensor + stage.sums_tensor
            parts["sequence"] += work.sequence + stage.sums_sequence
            parts["expert"] += work.expert
            parts["data"] += (count + empty) * stage.over_data + stage.sums
            parts["optimizer"] += stage.update
        total = sum(parts.values())
        if total > seconds:  # where others lend their cores, or rounding
            parts = {name: part * seconds / total for name, part in parts.items()}
        parts["bubble"] = max(0.0, seconds - total)
        parts["reading"] = self.reading(choice)
        late = self.machine.errors.noise * math.sqrt(2 * math.log(choice.ranks))
        parts["stragglers"] = late * (seconds + parts["reading"]) + self.delay(choice, exchanges)
        return Estimate(seconds + parts["reading"] + parts["stragglers"], self.memory.of(choice), parts)

    def reading(self, choice: Choice) -> float:
        """Seconds of a step's samples: their tokens are read, and copied once as int64 ids and targets."""
        device, samples = self.machine.device, self.job.sequences(choice) * choice.microbatches
        tokens = samples * self.job.costs.context / (choice.ring * choice.ulysses)
        read = 8 * tokens / device.reading if device.reading else 0.0
        return samples * device.sample + read + 4 * 8 * tokens / device.bandwidth
