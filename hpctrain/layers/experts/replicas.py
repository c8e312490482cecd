"""Replicas of hot experts on ranks that have less to do, for one microbatch of one layer.

A replica takes some of an expert's tokens, with the expert's weights, which are sent there; the gradients of the
weights are sent home and added up. So nothing changes but who computes, and the order of that sum.

Source: Liu et al., "DeepSeek-V3 technical report" (2024), §3.4, of redundant experts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from hpctrain import comm
from hpctrain.grid import Axis

_PAYS = 32  # tokens, whose products in forward and backward take as long as sending the weights and their gradients


class Replica(NamedTuple):
    """Of an expert of rank `home`, on rank `guest`, for so many of its tokens."""

    home: int
    expert: int
    guest: int
    tokens: int


def chosen_replicas(load: Sequence[int], of_rank: Sequence[int], most: int) -> list[Replica]:
    """Up to `most` of them: of the hottest expert of the rank with the most tokens, on the rank with the fewest, for so
    many tokens that neither of the two passes the mean.

    Args:
        load: tokens of each expert, over all ranks.
        of_rank: how many experts each rank holds.

    >>> chosen_replicas([1000, 0, 0, 200], [1, 1, 1, 1], 2)
    [Replica(home=0, expert=0, guest=1, tokens=300), Replica(home=0, expert=0, guest=2, tokens=300)]
    >>> chosen_replicas([300, 299], [1, 1], 1)
    []
    """
    homes = [rank for rank, count in enumerate(of_rank) for _ in range(count)]
    kept, work, ranks = list(load), [0] * len(of_rank), range(len(of_rank))
    for home, tokens in zip(homes, load):
        work[home] += tokens
    mean, found = sum(load) / len(of_rank), []
    for _ in range(most):
        busiest, idlest = max(ranks, key=work.__getitem__), min(ranks, key=work.__getitem__)
        hottest = max((e for e, home in enumerate(homes) if home == busiest), key=kept.__getitem__, default=None)
        if hottest is None:
            break
        tokens = min(kept[hottest], int(work[busiest] - mean), int(mean - work[idlest]))
        if tokens < _PAYS:
            break
        found.append(Replica(busiest, hottest, idlest, tokens))
        for rank, change in ((busiest, -tokens), (idlest, tokens)):
            work[rank] += change
        kept[hottest] -= tokens
    return sorted(found)


class Replicas:
    """Those of one microbatch; alike on all ranks of the axis.

    Attributes: `of_rank`, how many experts each rank computes, its own and then, in the order of `listed`, those that
    it has a replica of.
    """

    def __init__(self, axis: Axis, own: Sequence[int], listed: Sequence[Replica]):
        self.axis, self.listed, self._own = axis, listed, own
        self.of_rank = [count + sum(each.guest == rank for each in listed) for rank, count in enumerate(own)]
        self._leaving = sorted((each for each in listed if each.home == axis.rank), key=lambda each: each.guest)
        self._sends = [sum(each.guest == rank for each in self._leaving) for rank in range(axis.size)]
        self._receives = [
            sum((each.home, each.guest) == (rank, axis.rank) for each in listed) for rank in range(axis.size)
        ]

    def numbered(self, experts: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """`experts` (tokens, top_k) by their place among all that ranks compute, the number of them for a pair that is
        dropped: of an expert's tokens, counted through the ranks, the first ones stay, the next go to its first
        replica, and so on. `table` (ranks, experts) has the tokens of each rank."""
        firsts, rank = list(itertools.accumulate(self.of_rank, initial=0)), self.axis.rank
        places = [first + number for first, count in zip(firsts, self._own) for number in range(count)]
        numbers = torch.tensor([*places, firsts[-1]], device=experts.device)[experts]
        used = [first + count for first, count in zip(firsts, self._own)]  # the place of each rank's next replica
        before, totals = table[:rank].sum(0), table.sum(0).tolist()
        for expert, replicas in itertools.groupby(self.listed, key=lambda each: each.expert):
            ends, at = [totals[expert]], [places[expert]]
            for each in replicas:
                at.append(used[each.guest])
                used[each.guest] += 1
                ends = [ends[0] - each.tokens, *ends[1:], each.tokens]
            here = (experts == expert).nonzero(as_tuple=True)
            order = before[expert] + torch.arange(len(here[0]), device=experts.device)
            which = torch.bucketize(order, torch.tensor(ends, device=order.device).cumsum(0), right=True)
            numbers[here] = torch.tensor(at, device=order.device)[which]
        return numbers

    def weights(self, up: torch.Tensor, down: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of the experts that this rank has a replica of, from the ranks' own ones."""
        own = self._number_here(up.device)
        leaving = torch.cat([up[own].flatten(1), down[own].flatten(1)], 1)
        came = comm.all_to_all(leaving, self.axis, self._sends, self._receives)
        return _parted(came, up, down)

    def gradients_home(self, up: torch.Tensor, down: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Which of this rank's experts have replicas elsewhere, and the gradients that come from there."""
        leaving = torch.cat([up.flatten(1), down.flatten(1)], 1)
        came = comm.all_to_all(leaving, self.axis, self._receives, self._sends)
        return self._number_here(up.device), *_parted(came, up, down)

    def _number_here(self, device):
        """Of the experts that leave, among this rank's."""
        first = sum(self._own[: self.axis.rank])
        return torch.tensor([each.expert - first for each in self._leaving], dtype=torch.int64, device=device)


def _parted(both, up, down):
    width = up.shape[1] * up.shape[2]
    return both[:, :width].unflatten(1, up.shape[1:]), both[:, width:].unflatten(1, down.shape[1:])
