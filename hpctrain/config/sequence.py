"""How ranks that share sequences are divided into a ring and Ulysses ranks, where only their number is given."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpctrain.models.costs import TransformerCosts


@dataclass(frozen=True)
class SequenceChoice:
    """ring × Ulysses ranks for a model.

    Args:
        size: ranks that share a sequence.
        method: of choices.SEQUENCE_METHODS.
        columns: tensor ranks that divide the heads.
    """

    size: int
    method: str
    model: TransformerCosts
    columns: int

    @property
    def ulysses(self) -> int:
        """The others are the ring's. By "auto" the fewest elements move; of equals, the most Ulysses ranks."""
        if self.method == "auto":
            return min(self._candidates(), key=lambda ulysses: (self._elements(ulysses), -ulysses))
        return self.size if self.method == "ulysses" else 1

    def describe(self) -> str:
        """What was chosen, and why."""
        moved = (
            f"{self._elements(each):,.0f} on ring {self.size // each} × Ulysses {each}" for each in self._candidates()
        )
        return (
            f"grid.sequence = {self.size} is ring {self.size // self.ulysses} × Ulysses {self.ulysses}, by "
            f"sequence.method = {self.method}; elements that a rank receives in a layer's attention for each of its "
            f"tokens: {', '.join(moved)}"
        )

    def _candidates(self) -> list[int]:
        """Ulysses sizes that divide the ranks, and the query heads of the tensor rank with the most."""
        groups, queries = self.model.kv_heads, self.model.heads // self.model.kv_heads
        common = math.gcd(self.size, math.ceil(groups / self.columns) * queries)
        return [each for each in range(1, common + 1) if common % each == 0]

    def _elements(self, ulysses: int) -> float:
        return sum(self.model.sequence_elements(1.0, self.size // ulysses, ulysses, self.columns))
