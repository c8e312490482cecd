"""Between stages: which consecutive layers each stage has, on which tensor box of its ranks.

Stages have equally many ranks, but may arrange them in different boxes; the message between two of them is then
re-partitioned. The time of a step by formula is Σ t + messages + (microbatches - 1) · max t, with t of a microbatch
there and back in a stage; what comes out is simulated with its schedule.

Source: Zheng et al., "Alpa" (OSDI 2022), §5.2, to whose sum messages are added.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hpctrain.choices import check_product
from hpctrain.config import Config
from hpctrain.pipeline.partitioners.dynamic import bisect_bounds
from hpctrain.plan import job as jobs
from hpctrain.plan import stage_messages
from hpctrain.plan.estimator import Estimator, Stage
from hpctrain.plan.job import Box, Choice
from hpctrain.plan.machine import Machine
from hpctrain.plan.memory import allocatable


@dataclass(frozen=True)
class Chain:
    """Layers that are to be cut into stages.

    Attributes:
        time[box, start, stop]: seconds of a microbatch there and back in layers start to stop; infinite where stop is
            not after start.
        bytes[stage][box, start, stop]: that a rank needs.
        message[start, box, other]: seconds there and back of what goes from a stage on `box` to one on `other` whose
            first layer is `start`.
        microbatches: of a step.
        limit: bytes that a rank has.
        same_ends: the first and the last stage must have one box.
    """

    time: np.ndarray
    bytes: Sequence[np.ndarray]
    message: np.ndarray
    microbatches: int
    limit: float = math.inf
    same_ends: bool = False

    @property
    def stages(self) -> int:
        return len(self.bytes)

    def seconds(self, ends: Sequence[int], boxes: Sequence[int]) -> float:
        """Of a step with stages that end before these layers; infinite where one does not fit."""
        starts = [0, *ends[:-1]]
        if self.same_ends and boxes[0] != boxes[-1]:
            return math.inf
        each = [float(self.time[place]) for place in zip(boxes, starts, ends)]
        if any(need[place] > self.limit for need, place in zip(self.bytes, zip(boxes, starts, ends))):
            return math.inf
        messages = sum(float(self.message[place]) for place in zip(starts[1:], boxes, boxes[1:]))
        return sum(each) + messages + (self.microbatches - 1) * max(each)

    def best(self) -> tuple[list[int], list[int]] | None:
        """The ends and boxes of least time that fit, or None.

        Dynamic programming under a bound on the slowest stage gives the least sum of stages and messages. The bounds
        are bisected; a range of them is left out where its least bound and the least sum there are no better than what
        was found.
        """
        firsts = range(len(self.time)) if self.same_ends and self.stages > 1 else [None]
        found = [cut for first in firsts if (cut := self._best(first)) is not None]
        return min(found, key=lambda cut: self.seconds(*cut), default=None)

    def _best(self, first: int | None) -> tuple[list[int], list[int]] | None:
        bounds = np.unique(self.time[np.isfinite(self.time)])
        best: tuple[list[int], list[int]] | None = None
        least = math.inf

        def under(bound):
            nonlocal best, least
            total, cut = self._under(bound, first)
            if cut is not None and self.seconds(*cut) < least:
                best, least = cut, self.seconds(*cut)
            return total, least

        bisect_bounds(bounds.tolist(), self.microbatches - 1, under)
        return best

    def _under(self, bound: float, first: int | None) -> tuple[float, tuple[list[int], list[int]] | None]:
        """The least sum of stages that each take at most `bound`, and of messages; the ends and boxes. With `first`,
        both ends have this box."""
        boxes, layers = len(self.time), self.time.shape[1] - 1
        allowed = np.where(self.time <= bound, self.time, math.inf)
        # sums[start, box]: of the stages before `start`, with the message to a stage on `box`
        sums = np.full((layers + 1, boxes), math.inf)
        sums[0] = 0.0
        froms, starts = [], []
        for stage in range(self.stages):
            one = np.where(self.bytes[stage] <= self.limit, allowed, math.inf)
            if first is not None and stage in (0, self.stages - 1):
                one = np.where(np.arange(boxes)[:, None, None] == first, one, math.inf)
            through = sums.T[:, :, None] + one  # [box, start, stop]
            start = through.argmin(1)
            totals = np.take_along_axis(through, start[:, None], 1)[:, 0]  # [box, stop]
            starts.append(start)
            onward = totals.T[:, :, None] + self.message  # [stop, box, next box]
            froms.append(onward.argmin(1))
            sums = onward.min(1)
        box = int(totals[:, layers].argmin())
        if totals[box, layers] == math.inf:
            return math.inf, None
        total, ends, chosen = float(totals[box, layers]), [layers], [box]
        for stage in range(self.stages - 1, 0, -1):
            ends.append(int(starts[stage][chosen[-1], ends[-1]]))
            chosen.append(int(froms[stage - 1][ends[-1], chosen[-1]]))
        return total, (ends[::-1], chosen[::-1])


@dataclass(frozen=True)
class StageCut:
    """The best layers and boxes of the stages of a configuration.

    Attributes:
        layers, boxes: of each stage.
        seconds: of a step, as `predict` has it.
    """

    layers: list[int]
    boxes: list[Box]
    seconds: float

    @property
    def settings(self) -> dict[str, object]:
        """{"section.key": value}"""
        names = ["x".join(map(str, box)) for box in self.boxes]
        return {"grid.tensor": list(self.boxes[0]), "pipeline.boxes": names, "pipeline.partition": self.layers}


def between_stages(config: Config, machine: Machine | str) -> StageCut:
    """The best cut of a configuration's layers into stages with boxes of as many ranks as grid.tensor has, by the cost
    model of `predict`: of the best by formula, and of the best for each one box in all stages, the one that is the
    fastest when simulated. Starts neither MPI nor torch.

    Raises:
        ValueError: as `predict`; where a rank has several stages, or blocks are of two kinds; where nothing fits.
    """
    machine = Machine.load(machine) if isinstance(machine, str) else machine
    job, choice = jobs.read(replace(config, pipeline=replace(config.pipeline, boxes=[])))
    machine = machine.crowded(config.ranks)
    if job.costs.mixture or [len(own) for own in Estimator(job, machine).placement(choice)[0]] != [1] * choice.pipeline:
        raise ValueError(
            "boxes of stages are planned for blocks of one kind and one stage on each rank, got model.kind ="
            f" {config.model.kind} and pipeline.schedule = {choice.schedule}; use 1f1b"
        )
    planner = _Planner(Estimator(job, machine), choice)
    found = []
    for boxes in [planner.boxes, *([box] for box in planner.boxes)]:
        if (cut := planner.chain(boxes).best()) is not None:
            ends, numbers = cut
            layers = [stop - start for start, stop in itertools.pairwise([0, *ends])]
            chosen = [boxes[number] for number in numbers]
            whole = choice._replace(partition=tuple(layers), boxes=tuple(chosen))
            found.append(StageCut(layers, chosen, planner.estimator.estimate(whole).seconds))
    if not found:
        raise ValueError(f"no cut fits into the {machine.device.memory / 2**30:.2f} GiB of a rank of {machine.name}")
    return min(found, key=lambda cut: cut.seconds)


class _Planner:
    """The costs of stages by their number of blocks: all blocks are alike, and the ends have more."""

    def __init__(self, estimator: Estimator, choice: Choice):
        self.estimator, self.choice = estimator, choice
        self.ranks = math.prod(choice.box)
        self.boxes = [box for box in _boxes(self.ranks) if _allowed(choice.algorithm, box)]
        self.stage = functools.cache(self._stage)
        self.bytes = functools.cache(self._bytes)

    def chain(self, boxes: Sequence[Box]) -> Chain:
        estimator, choice = self.estimator, self.choice
        layers, p, m = estimator.job.costs.layers, choice.pipeline, choice.microbatches
        in_flight = estimator.in_flight(choice)
        time = np.full((len(boxes), layers + 1, layers + 1), math.inf)
        need = np.zeros((p, *time.shape))
        for b, box in enumerate(boxes):
            for start, stop in itertools.combinations(range(layers + 1), 2):
                stage = box, stop - start, start == 0, stop == layers
                time[b, start, stop] = self.stage(*stage).microbatch
                for s in range(p):
                    need[s, b, start, stop] = self.bytes(*stage, in_flight[s].get(s, 0))
        limit = allocatable(estimator.machine)
        distance = self.ranks * choice.ulysses
        message = np.array([[2 * stage_messages.seconds(estimator.job, estimator.network, choice, box, other, distance)
                             for other in boxes] for box in boxes])  # fmt: skip
        ends = estimator.job.costs.tied
        return Chain(time, list(need), np.broadcast_to(message, (layers + 1, *message.shape)), m, limit, ends)

    def _stage(self, box: Box, count: int, first: bool, last: bool) -> Stage:
        return self.estimator.stage(self._on(box), (count, 0), first, last)

    def _bytes(self, box: Box, count: int, first: bool, last: bool, microbatches: float) -> float:
        choice = self._on(box)
        states, kept = self.estimator.memory.stage(choice, (count, 0), first, last)
        return states + microbatches * kept + self.estimator.memory.working(choice, last)

    def _on(self, box: Box) -> Choice:
        return self.choice._replace(x=box[0], y=box[1], z=box[2])


def _boxes(ranks: int) -> list[Box]:
    return [(x, y, ranks // (x * y)) for x in range(1, ranks + 1) for y in range(1, ranks + 1) if ranks % (x * y) == 0]


def _allowed(algorithm: str, box: Box) -> bool:
    try:
        check_product(algorithm, *box)
    except ValueError:
        return False
    return True
