"""The best layouts of a job on so many ranks, by branch and bound.

Choices wait in a queue by a lower bound of their seconds: first layouts, by what any of their choices takes at least;
when a layout's turn comes, its choices take its place, each by a bound of its own; when a choice's turn comes, it is
simulated. As nothing is dropped whose bound is below the seconds of the `top` best that fit, these are the best of all.

A bound counts work that some rank does one after another; how long it waits, only a simulation tells:

    layout    m (blocks + embedding + head) / p, without recomputation: the mean rank's work, at most the busiest's
    choice    of every rank, what must be done before its first task, all its work, and what must follow its last task
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable

from hpctrain.config import Config
from hpctrain.plan import job as jobs
from hpctrain.plan.estimator import Estimate, Estimator
from hpctrain.plan.job import Choice
from hpctrain.plan.machine import Machine
from hpctrain.plan.prediction import Prediction, predicted
from hpctrain.plan.space import Layout, choices, expert_ranks, layouts

ROUNDING = 1 - 1e-9  # bounds are sums in another order than what they bound
GIB = 2**30


def search(config: Config, ranks: int, machine: Machine | str, top: int = 5) -> list[Prediction]:
    """The `top` choices that take the fewest seconds and fit into memory, the best first.

    Searched are grids, tensor boxes, ranks of experts, microbatches, synchronous schedules with their virtual stages,
    ZeRO's levels and recomputation; all else stays as the configuration has it. `settings` of a prediction make the
    configuration it is of. The training is the same, to rounding, with all of them.

    Raises:
        ValueError: for an unknown machine, a number of ranks that the job cannot use, and where nothing fits: with the
            memory that the leanest choice lacks.
    """
    machine = Machine.load(machine) if isinstance(machine, str) else machine
    if ranks < 1 or top < 1:
        raise ValueError(f"--ranks and --top must be at least 1, got {ranks} and {top}")
    job, given = jobs.read(config)
    estimator = Estimator(job, machine.crowded(ranks))
    best = Search(estimator, given, ranks).best(top)
    return [predicted(estimator, choice, estimate) for estimate, choice in best]


class Search:
    """Branch and bound over the choices of one job.

    Attributes:
        simulated: choices that were, so far.
    """

    def __init__(self, estimator: Estimator, given: Choice, ranks: int):
        self.estimator, self.job, self.given = estimator, estimator.job, given
        self.memory = estimator.machine.device.memory
        self.layouts = list(layouts(self.job, given, ranks))
        self.simulated = 0
        noise = estimator.machine.errors.noise
        self._late = 1 + noise * math.sqrt(2 * math.log(ranks))
        if not self.layouts:
            raise ValueError(
                f"no grid of {ranks} ranks leaves work for all: there are {self.job.batch} sequences a step and "
                f"{self.job.costs.layers} layers, and tensor.algorithm = {given.algorithm}; use fewer ranks"
            )

    def best(self, top: int) -> list[tuple[Estimate, Choice]]:
        """Those that take the fewest seconds; of equals, the first in the order of their settings."""
        number = itertools.count()
        queue: list[tuple[float, int, Layout | list[Choice]]] = [
            (self.layout_bound(layout), next(number), layout) for layout in self.layouts
        ]
        heapq.heapify(queue)
        found: list[tuple[float, Choice, Estimate]] = []
        while queue:
            bound, _, one = heapq.heappop(queue)
            if len(found) == top and bound > found[-1][0]:
                break
            if isinstance(one, Layout):
                for same in self.alike(one):
                    further = max(bound, self.choice_bound(same[0]))
                    heapq.heappush(queue, (further, next(number), same))
                continue
            if one[1:]:  # those that recompute more take longer
                further = max(bound, self.choice_bound(one[1]))
                heapq.heappush(queue, (further, next(number), one[1:]))
            if self.fits(one[0]):
                estimate = self.estimator.estimate(one[0])
                self.simulated += 1
                found = sorted([*found, (estimate.seconds, one[0], estimate)], key=lambda each: each[:2])[:top]
        if not found:
            raise ValueError(self._shortage())
        return [(estimate, choice) for _, choice, estimate in found]

    def alike(self, layout: Layout) -> Iterable[list[Choice]]:
        """The choices of a layout, those together that differ in recomputation alone, the less of it the earlier."""
        same: dict[Choice, list[Choice]] = {}
        for choice in choices(self.job, self.given, layout):
            same.setdefault(choice._replace(recompute=""), []).append(choice)
        return same.values()

    def fits(self, choice: Choice) -> bool:
        return self.estimator.memory(choice) <= self.memory

    def layout_bound(self, layout: Layout) -> float:
        """Seconds that any choice of this layout takes at least."""
        given = self.given
        shared = given.algorithm, given.ring, given.ulysses
        made = [
            Choice(*layout, "1f1b", 0, "none", "ddp", *shared, expert)
            for expert in expert_ranks(self.job, given, layout)
        ]
        work = min(self.estimator.whole_microbatch(choice) for choice in made)
        return self._least(made[0], layout.microbatches * work / layout.pipeline)

    def choice_bound(self, choice: Choice) -> float:
        """Seconds that a choice takes at least: the most over its pipeline's ranks."""
        local, copies = self.estimator.placement(choice)
        if copies > 1:
            return 0.0  # they share the microbatches in a way that the schedule alone knows
        stages = self.estimator.stages(choice)
        edges = [*self.estimator.edges(choice), 0.0]
        # the first microbatch reaches a stage through all before it, and the last gradient goes back through them;
        # where backwards are split, a rank's last task may be a weight's gradient, which nothing follows
        splits = choice.schedule.startswith("zb")
        reached, followed = [0.0], [0.0]
        for stage, edge in zip(stages, edges):
            forward, *backward = stage.passes
            reached.append(reached[-1] + forward + edge)
            followed.append(followed[-1] + (0.0 if splits else sum(backward) + edge))
        endings = [sum(stages[s].ending for s in own) for own in local]
        home = next(rank for rank, own in enumerate(local) if 0 in own)
        last = 0.0 if splits else endings[home]
        return max(
            self._least(
                choice,
                reached[min(own)]
                + choice.microbatches * sum(stages[s].microbatch for s in own)
                + max(ending, followed[min(own)] + last),
            )
            for own, ending in zip(local, endings)
        )

    def _least(self, choice: Choice, seconds: float) -> float:
        return (seconds + self.estimator.reading(choice)) * self._late * ROUNDING

    def _shortage(self) -> str:
        leanest, least = None, math.inf
        for layout in self.layouts:
            for choice in choices(self.job, self.given, layout):
                need = self.estimator.memory(choice)
                if need < least:
                    leanest, least = choice, need
        assert leanest is not None  # there are layouts
        settings = " ".join(f"{name}={value}" for name, value in leanest.settings.items())
        return (
            f"no plan fits: device.memory of {self.estimator.machine.name} is {self.memory / GIB:.2f} GiB, and the "
            f"leanest choice needs {least / GIB:.2f} GiB, {(least - self.memory) / GIB:.2f} GiB more, with {settings}; "
            "use more ranks, a smaller model or a shorter context"
        )


def changes(found: list[Prediction]) -> list[str]:
    """Why each of the others might be the best after all: the part of the best's time that would have to grow, in both
    alike, until it was no longer the faster one; the one that has to grow the least."""
    best, *others = found
    lines = []
    for other in others:
        factors = {
            name: 1 + (other.seconds - best.seconds) / (part - other.parts[name])
            for name, part in best.parts.items()
            if part > other.parts[name]
        }
        slower = f"{100 * (other.seconds / best.seconds - 1):.1f} % slower"
        if factors:
            name = min(factors, key=factors.__getitem__)
            slower += f"; the faster one where {name} takes {factors[name]:.2f} times as long"
        lines.append(slower)
    return lines
