"""How a choice divides a model: what each stage and rank has, and what its parts cost there."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.plan import pipelines
from hpctrain.plan.job import Choice, Job
from hpctrain.plan.machine import Machine
from hpctrain.plan.network import Group, Network
from hpctrain.plan.part import Part
from hpctrain.plan.passes import Box
from hpctrain.shard import split_sizes


@dataclass(frozen=True)
class Parts:
    """A block with a mixture, where there is one, and one without; the embedding and the head; seconds of the sums over
    z of the weights of each block, and of the head's."""

    blocks: tuple[Part, Part]
    embedding: Part
    head: Part
    z_sums: tuple[float, float, float]


class Division:
    """Of one job on one machine; what several choices share is computed once."""

    def __init__(self, job: Job, machine: Machine):
        self.job, self.machine = job, machine
        self.network = Network(machine)
        self._parts: dict[tuple, Parts] = {}
        self.block_elements = functools.cache(self._block_elements)

    def parts(self, choice: Choice, empty: bool = False) -> Parts:
        """Of a microbatch; or of one without rows."""
        distance = choice.pipeline if choice.ring > 1 else 1  # of the boxes of a ring
        shape = choice.algorithm, choice.box, choice.ring, choice.ulysses, choice.expert, choice.expert_tensor
        sequences = 0 if empty else self.job.sequences(choice)
        key = *shape, distance, choice.recompute, sequences, *self._figures(choice)
        if key not in self._parts:
            box, costs = Box(self.job, self.machine, self.network, choice, empty), self.job.costs

            def kind(dense: bool) -> tuple[Part, float]:
                z_sums = sum(box.weight_sum(e.n_in, e.n_out) for e in costs.linears_of(dense))
                return box.block(choice.recompute, dense), z_sums

            mixed, mixed_sums = kind(False)
            dense, dense_sums = kind(True) if costs.dense_layers else (mixed, mixed_sums)
            z_sums = mixed_sums, dense_sums, box.weight_sum(costs.width, costs.vocabulary)
            self._parts[key] = Parts((mixed, dense), box.embedding(), box.head(), z_sums)
        return self._parts[key]

    def _figures(self, choice: Choice) -> tuple[int, ...]:
        """What else decides seconds where a machine's file has figures of it."""
        device = self.machine.device
        return (
            choice.microbatches if self.machine.software.accumulates else 0,
            choice.pipeline if device.cold_bandwidth or self.machine.software.accumulates else 0,
        )

    def full_microbatches(self, choice: Choice) -> float:
        """How many of the fullest microbatch are a step's work: fewer than there are where some have fewer sequences or
        none. In a pipeline all count, as others wait for the fullest."""
        fullest = self.job.sequences(choice)
        if choice.pipeline > 1:
            return choice.microbatches
        return -(-self.job.batch // (choice.data - self.job.servers)) / fullest

    def evenness(self, choice: Choice) -> float:
        """Rows of the mean rank and microbatch as a part of the fullest's."""
        fullest = -(-self.job.sequences(choice) // choice.z)
        replicas = choice.data - self.job.servers
        return self.job.batch / (replicas * choice.microbatches * choice.z * fullest)

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

    def sums_once(self, choice: Choice) -> bool:
        """Whether gradients of weights that z divides are summed over z once a step, with all microbatches'."""
        job = self.job
        return (
            "weight_gradient" in job.overlap and choice.method not in ("zero2", "zero3") and job.reduce == job.itemsize
        )

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

    def homes(self, choice: Choice) -> list[int]:
        """The rank of each stage; the first where several have it."""
        home = {stage: rank for rank, own in reversed([*enumerate(self.placement(choice)[0])]) for stage in own}
        return [home[stage] for stage in range(len(home))]

    def alike(self, choice: Choice) -> list[Choice]:
        """Of each stage, its box and all else that decides its costs."""
        plain = choice._replace(schedule="", virtual_stages=0, partition=())
        return [plain.at(rank) for rank in self.homes(choice)]

    def replica_groups(self, choice: Choice) -> tuple[tuple[Group, Group], tuple[Group, Group]]:
        """The ranks of one replica that hold the same weights, and the same experts, which are not spread; and the
        replicas, for both."""
        box, shared = math.prod(choice.box), choice.ring * choice.ulysses
        weights = Group(shared, box * (choice.pipeline if choice.ring > 1 else 1))
        across = Group(choice.data, box * shared * choice.pipeline)
        return (weights, Group(shared * box)), (across, across)

    def groups(self, choice: Choice) -> tuple[Group, Group]:
        """The ranks that hold the same weights, and the same experts, which come one after another on their axis."""
        box = math.prod(choice.box)
        copies = Group(choice.replicas * box // choice.expert, choice.expert if choice.expert > 1 else 1)
        return Group(choice.replicas, choice.pipeline * box), copies


@functools.lru_cache(1 << 10)
def _kinds(layers: tuple[int, ...], dense: int) -> list[tuple[int, int]]:
    found = []
    for count in layers:
        without = min(count, dense)
        dense -= without
        found.append((count - without, without))
    return found
