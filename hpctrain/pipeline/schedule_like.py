"""What is read of a schedule by what it is made of: certificate, simulation and lowering."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from hpctrain.pipeline.actions import Action, Fused
from hpctrain.pipeline.graph import StageGraph


class ScheduleLike(Protocol):
    """The attributes of `schedules.Schedule`, which are explained there."""

    @property
    def name(self) -> str: ...

    @property
    def order(self) -> Sequence[Sequence[Action | Fused]]: ...

    @property
    def placement(self) -> Mapping[tuple[int, int], int]: ...

    @property
    def graph(self) -> StageGraph: ...

    @property
    def microbatches(self) -> int: ...

    @property
    def slices(self) -> int: ...

    @property
    def training(self) -> bool: ...

    @property
    def delayed(self) -> bool: ...

    @property
    def ranks(self) -> int: ...

    @property
    def replicas(self) -> int: ...
