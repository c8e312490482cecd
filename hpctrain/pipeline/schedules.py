"""A schedule: for each rank an ordered list of actions. Order only; no times, no messages."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.pipeline.actions import BACKWARD, FORWARD, GRADIENT, UPDATE, WEIGHT_GRADIENT, Action, Fused, flat
from hpctrain.pipeline.graph import StageGraph
from hpctrain.pipeline.lowering import Lowered, lower
from hpctrain.pipeline.message_driven import AMPNet
from hpctrain.pipeline.simulate import Costs, Simulation, simulate
from hpctrain.pipeline.tasks import Tasks
from hpctrain.pipeline.timeline import picture
from hpctrain.pipeline.validate import validate

COSTS = Costs()  # forward, input gradient and weight gradient of every stage take the same time, messages none


@dataclass(frozen=True)
class Schedule:
    """An order of work on every rank. Whether it is right is for `validate` to say; `lower` does not go on without.

    Attributes:
        name: for messages and pictures.
        graph: the stages.
        placement: {(replica, stage): rank}; replicas of a stage hold the same weights and divide the microbatches.
        order[r]: the actions of rank r; fused pairs are one entry.
        microbatches, slices: how many of each; every microbatch goes through all stages of one replica.
        training: False for forwards alone, which have no gradients and no update.
        delayed: True where weights change while microbatches are under way, so that gradients are of older versions;
            False where one update follows all gradients.
        asynchronous: where ranks work on whatever has arrived; `order` is then the one that they take when all stages
            cost the same.
    """

    name: str
    graph: StageGraph
    placement: Mapping[tuple[int, int], int]
    order: Sequence[Sequence[Action | Fused]]
    microbatches: int
    slices: int = 1
    training: bool = True
    delayed: bool = False
    asynchronous: AMPNet | None = None

    @property
    def ranks(self) -> int:
        return len(self.order)

    @property
    def replicas(self) -> int:
        return 1 + max(replica for replica, _ in self.placement)

    @functools.cached_property
    def replica_of(self) -> list[int]:
        """The replica that each microbatch goes through."""
        found = {a.microbatch: a.replica for order in self.order for a in flat(order) if a.kind == FORWARD}
        return [found[m] for m in range(self.microbatches)]

    @functools.cached_property
    def updates(self) -> list[list[int]]:
        """The microbatches whose gradients go into each update of the weights, one after another."""
        if not self.delayed:
            return [list(range(self.microbatches))]
        found: list[list[int]] = [[]]
        for action in flat(self.order[self.placement[0, 0]]):
            if action.stage == 0 and action.kind in (BACKWARD, WEIGHT_GRADIENT):
                found[-1].append(action.microbatch)
            elif action.stage == 0 and action.kind == UPDATE:
                found.append([])
        return found[:-1]

    @property
    def forwards_first(self) -> bool:
        """Whether all forwards of a step come before its first backward in every stage, which has one replica."""
        for order in self.order:
            begun = set()
            for action in flat(order):
                if action.kind in GRADIENT:
                    begun.add(action.stage)
                elif action.kind == FORWARD and action.stage in begun:
                    return False
        return self.replicas == 1 and not self.delayed

    @property
    def splits(self) -> bool:
        """Whether any backward is split into input and weight gradients."""
        return any(action.kind == WEIGHT_GRADIENT for order in self.order for action in flat(order))

    def validate(self) -> Tasks:
        """Check that all work is done once, in an order that can be carried out, with reductions and updates in place.

        Raises:
            ValueError: naming the action that is wrong, or those that wait for each other.
        """
        return validate(self)

    def simulate(self, costs: Costs = COSTS) -> Simulation:
        """Makespan, bubbles, critical path, peak memory and staleness, for these costs.

        Raises:
            ValueError: for an order that cannot be carried out, naming the actions that wait for each other, and for
                costs that do not fit the stages.
        """
        return simulate(self, costs, Tasks(self))

    def lower(self, costs: Costs = COSTS) -> Lowered:
        """Programs with messages, proven to be free of deadlock however messages block. Costs decide the order of
        messages, never whether it is safe.

        Raises:
            ValueError: as `validate` and `simulate`; and if the programs do not pass the replay with blocking messages.
        """
        tasks = self.validate()
        return lower(self, tasks, simulate(self, costs, tasks))

    def plot(self, path: str | Path, costs: Costs = COSTS) -> None:
        """Draw the simulated timeline: one row a rank, colour by kind, the number the microbatch."""
        title = f"{self.name}: {self.ranks} ranks, {self.microbatches} microbatches"
        picture(self.simulate(costs), path, title)
