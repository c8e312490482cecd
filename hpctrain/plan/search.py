"""The best layouts of a job on so many ranks, by branch and bound.

Choices wait in a queue by a lower bound of their seconds (`bounds.py`): first grids, by what any of their choices takes
at least, then their layouts, with a number of microbatches. When a layout's turn comes, its choices take its place,
each by a bound of its own; when a choice's turn comes, it is simulated. As nothing is dropped whose bound is below the
seconds of the `top` best that fit, these are the best of all.
"""

from __future__ import annotations

import dataclasses
import enum
import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from hpctrain.choices import DTYPES, RECOMPUTE, check_choice
from hpctrain.config import Config
from hpctrain.plan import job as jobs
from hpctrain.plan.bounds import Bounds
from hpctrain.plan.estimator import Estimate, Estimator
from hpctrain.plan.job import Choice
from hpctrain.plan.machine import Machine
from hpctrain.plan.prediction import Prediction, predicted
from hpctrain.plan.space import choices, grids, kept, layouts, ways

GIB = 2**30
GRIDS = ("grid.data", "grid.pipeline", "grid.tensor", "tensor.algorithm")  # settings that a grid decides
Found = tuple[float, Choice, Estimate]  # seconds, and what takes them


def search(
    config: Config,
    ranks: int,
    machine: Machine | str,
    top: int = 5,
    precisions: Sequence[str] = (),
    keep: Sequence[str] = (),
) -> list[Prediction]:
    """The `top` choices that take the fewest seconds and fit into memory, the best first.

    Searched are grids with the axes of sequences and experts, tensor boxes and their products, microbatches,
    synchronous schedules with their virtual stages and cuts, ZeRO's levels and recomputation; all else stays as the
    configuration has it. `settings` of a prediction make the configuration it is of. The training is the same, to
    rounding, with all of them.

    Args:
        precisions: values that precision.compute may have; that of the configuration alone, if none is given.
        keep: settings that stay as they are, of `space.FIELDS`.

    Raises:
        ValueError: for an unknown machine, boxes of stages, a number of ranks that the job cannot use, and where
            nothing fits: with the memory that the leanest choice lacks.
    """
    machine = Machine.load(machine) if isinstance(machine, str) else machine
    if ranks < 1 or top < 1:
        raise ValueError(f"--ranks and --top must be at least 1, got {ranks} and {top}")
    jobs.check_one_box(config, "a search")
    found: list[tuple[Found, Estimator]] = []
    failed: list[NothingFits] = []
    for precision in precisions or [config.precision.compute]:
        check_choice("--precision", precision, DTYPES)
        job, given = jobs.read(
            dataclasses.replace(config, precision=dataclasses.replace(config.precision, compute=precision))
        )
        estimator = Estimator(job, machine.crowded(ranks))
        try:
            best = Search(estimator, given, ranks, keep).best(top, [known for known, _ in found])
        except NothingFits as error:
            failed.append(error)
            continue
        found = [next((old for old in found if old[0] is each), (each, estimator)) for each in best]
    if not found:
        raise failed[-1]
    return [predicted(estimator, choice, estimate) for (_, choice, estimate), estimator in found]


class NothingFits(ValueError):
    """No choice fits into a device's memory."""


class Level(enum.IntEnum):
    """How much of what waits in the queue is chosen: a grid, by its own bound; its layouts, by that of their first; a
    layout; a layout and a way to keep replicas; choices that differ in recomputation alone."""

    GRID = 0
    LAYOUTS = 1
    LAYOUT = 2
    WAY = 3
    CHOICES = 4


class Search:
    """Branch and bound over the choices of one job.

    Attributes:
        simulated: choices that were, so far.
    """

    def __init__(self, estimator: Estimator, given: Choice, ranks: int, keep: Sequence[str] = ()):
        self.estimator, self.job, self.given, self.keep = estimator, estimator.job, given, tuple(keep)
        self.bounds = Bounds(estimator, given, ranks)
        self.memory = estimator.machine.device.memory
        decided = tuple(name for name in keep if name in GRIDS)
        self.grids = [grid for grid in grids(self.job, given, ranks) if kept(grid, given, decided)]
        self.simulated = 0
        if not self.grids:
            raise ValueError(
                f"no grid of {ranks} ranks leaves work for all: there are {self.job.batch} sequences a step of "
                f"{self.job.costs.context} tokens and {self.job.costs.layers} layers"
                + (f", and {', '.join(keep)} to be kept" if keep else "")
                + "; use fewer ranks"
            )

    def best(self, top: int, known: Iterable[Found] = ()) -> list[Found]:
        """Those that take the fewest seconds, of these and the `known` ones; of equals, the first in the order of
        their settings."""
        number = itertools.count()
        queue: list[tuple[float, int, Level, Any]] = [
            (self.bounds.grid(grid), next(number), Level.GRID, grid) for grid in self.grids
        ]
        heapq.heapify(queue)
        found = list(known)
        while queue:
            bound, _, level, one = heapq.heappop(queue)
            if len(found) == top and bound > found[-1][0]:
                break
            if level is Level.CHOICES:
                estimate = self.estimator.estimate(one[0])
                self.simulated += 1
                found = sorted([*found, (estimate.seconds, one[0], estimate)], key=lambda each: each[:2])[:top]
            for least, finer, part in self._parts(level, one):
                heapq.heappush(queue, (max(bound, least), next(number), finer, part))
        if not found:
            raise NothingFits(self._shortage())
        return found

    def _parts(self, level: Level, one: Any) -> Iterator[tuple[float, Level, Any]]:
        """What takes the place of one in the queue, by its own bound."""
        if level is Level.GRID:
            if lean := [layout for each in self.layouts(one) if (layout := self.bounds.lean(each))]:
                recompute = min((layout.recompute for layout in lean), key=RECOMPUTE.index)
                yield self.bounds.layouts(one._replace(recompute=recompute)), Level.LAYOUTS, lean
        elif level is Level.LAYOUTS:
            for layout in one:
                yield self.bounds.layout(layout), Level.LAYOUT, layout
        elif level is Level.LAYOUT:
            for way in ways(self.job, self.given, one):
                if (least := self.bounds.way(way)) < math.inf:
                    yield least, Level.WAY, way
        elif level is Level.WAY:
            for alike in self.alike(one):
                yield self.bounds.choice(alike[0]), Level.CHOICES, alike
        elif len(one) > 1:  # those that recompute more take longer
            yield self.bounds.choice(one[1]), Level.CHOICES, one[1:]

    def layouts(self, grid: Choice) -> list[Choice]:
        """Of a grid; the number of microbatches that is to be kept may leave some with fewer sequences than others."""
        if "train.microbatches" not in self.keep:
            return [*layouts(self.job, grid)]
        layout = grid._replace(microbatches=self.given.microbatches)
        return [layout] if layout.microbatches <= self.job.sequences(grid) else []

    def choices(self, way: Choice) -> Iterator[Choice]:
        """Of a layout and a way to keep replicas."""
        return (choice for choice in choices(self.job, self.given, way) if kept(choice, self.given, self.keep))

    def alike(self, way: Choice) -> Iterable[list[Choice]]:
        """The choices that fit into memory, those together that differ in recomputation alone, the less of it the
        earlier."""
        same: dict[Choice, list[Choice]] = {}
        for choice in self.choices(way):
            if self.fits(choice):
                same.setdefault(choice._replace(recompute=""), []).append(choice)
        return same.values()

    def fits(self, choice: Choice) -> bool:
        return self.estimator.memory.of(choice) <= self.memory

    def everything(self) -> Iterator[Choice]:
        """All choices, whether they fit or not."""
        for layout in itertools.chain.from_iterable(map(self.layouts, self.grids)):
            for way in ways(self.job, self.given, layout):
                yield from self.choices(way)

    def _shortage(self) -> str:
        leanest, least = None, math.inf
        every = itertools.chain.from_iterable(map(self.layouts, self.grids))
        queue = [(self.bounds.memory(layout, self.bounds.recomputed[-1]), layout) for layout in every]
        for bound, layout in sorted(queue):
            if bound >= least:
                break
            for choice in itertools.chain.from_iterable(map(self.choices, ways(self.job, self.given, layout))):
                if (need := self.estimator.memory.of(choice)) < least:
                    leanest, least = choice, need
        if leanest is None:
            return f"no layout has what is to be kept: {', '.join(self.keep)}"
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
