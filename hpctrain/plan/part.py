"""Seconds and bytes of one microbatch in a part of a model, on one rank."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Pass(NamedTuple):
    """Seconds: products and element-wise operations, and communication on the tensor, sequence and expert axes that
    nothing hides; and the number of exchanges on the tensor axes."""

    compute: float = 0.0
    tensor: float = 0.0
    sequence: float = 0.0
    expert: float = 0.0
    exchanges: float = 0.0

    @property
    def seconds(self) -> float:
        return self.compute + self.tensor + self.sequence + self.expert

    @staticmethod
    def total(counted: Iterable[tuple[Pass, float]]) -> Pass:
        """Of passes and how often each is done."""
        sums = [0.0] * len(Pass._fields)
        for each, count in counted:
            for number, value in enumerate(each):
                sums[number] += value * count
        return Pass(*sums)


@dataclass(frozen=True)
class Mixed:
    """A mixture of experts, forward; backward as much for the input's gradient, and for the weights'.

    Attributes:
        seconds: of products and copies; `rows`, of the exchange that makes rows whole and spreads them again; `sent`,
            of the dispatch there and back.
        kept, working: bytes, as of `Part`.
        operations: that are launched.
    """

    seconds: float = 0.0
    rows: float = 0.0
    sent: float = 0.0
    kept: float = 0.0
    working: float = 0.0
    operations: int = 0


@dataclass(frozen=True)
class Part:
    """A block, or what the first or last stage has besides, with a microbatch.

    Attributes:
        forward, input_gradient, weight_gradient: a backward takes both gradients.
        kept: bytes from forward to backward; working: bytes at most while it is computed, besides.
    """

    forward: Pass
    input_gradient: Pass
    weight_gradient: Pass
    kept: float
    working: float

    @functools.cached_property
    def seconds(self) -> float:
        return self.forward.seconds + self.input_gradient.seconds + self.weight_gradient.seconds

    @functools.cached_property
    def exchanges(self) -> float:
        return self.forward.exchanges + self.input_gradient.exchanges + self.weight_gradient.exchanges
