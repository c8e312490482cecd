"""How the rows of tokens come to the ranks of the experts that they are for, and the experts' results back.

A dispatch is a linear map D from the tokens of all ranks of the expert axis to rows of each rank's experts, one for
each pair of a token and an expert, sorted by expert. `to_experts` begins D, `to_tokens` its adjoint: the sum of a
token's rows. A layer is Dᵀ f(D x), and its gradient Dᵀ f'(D g), so that each moves as much forward as backward. What
the outputs count travels too (`weights_to_experts`), so that results can be added up before they come back.

With T tokens on each of N ranks, k of E experts for each and rows of h elements, a rank receives in each of the four
    all_to_all    k T (N - 1)/N h: a row for each pair
    once          p T (N - 1) h: a token goes to a rank once, p = 1 - C(E - E/N, k)/C(E, k) of them to each
    gather        T (N - 1) h: all tokens go to all ranks
elements where the load is even, and of weights, counts and places a few bytes for each pair. Where several ranks have
parts of an expert, a pair is one of a token and a part. On one node rows are read in place from shared memory
(`in_place.py`), those of `all_to_all` pair by pair.

Sources: Lepikhin et al., "GShard" (2020); Megatron-LM's token dispatchers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from hpctrain import comm
from hpctrain.grid import Axis
from hpctrain.layers.experts.bags import Bags, stable_argsort


class Dispatch:
    """Of one microbatch of one layer, on an axis of one rank.

    Args:
        axis: of the ranks that the experts are spread over.
        experts: (tokens, top_k) int64, the number of each token's experts; the number of all experts for a pair that
            is dropped. Its creation is collective.
        of_rank: how many experts each rank computes.
        sent: pairs of each expert that are kept, where they are known.

    Attributes: `kept`, pairs of this rank's tokens that are not dropped; `counts`, rows of each of this rank's experts,
    one after another, and `rows`, of all of them.
    """

    def __init__(
        self, axis: Axis, experts: torch.Tensor, of_rank: Sequence[int], sent: torch.Tensor | None = None
    ):  # fmt: skip
        self.axis, self.tokens, self.top_k, self._experts = axis, len(experts), experts.shape[1], experts
        self.of_rank, self._count = tuple(of_rank), sum(of_rank)
        self.sent = self._pairs_of_experts(experts) if sent is None else sent
        self._sent = self.sent.tolist()
        self.kept = sum(self._sent)
        self._alone = False
        self._arrange()

    @functools.cached_property
    def pairs(self) -> torch.Tensor:
        """Those that are kept, by expert, and of an expert as their tokens come. Those that are dropped sort last."""
        return stable_argsort(self._experts.reshape(-1), self._count + 1)[: self.kept]

    def _pairs_of_experts(self, experts: torch.Tensor) -> torch.Tensor:
        return torch.bincount(experts.reshape(-1), minlength=self._count + 1)[: self._count]

    def _arrange(self) -> None:
        """Find out what comes here."""
        self.counts, self.rows = self._sent, self.kept
        self._alone = self.top_k == 1 and self.tokens in self.counts  # one expert has them all: rows are the tokens
        if not self._alone:
            self._token = self.pairs // self.top_k
            self._bags = self.bags_of_pairs(torch.arange(self.rows, device=self.pairs.device))

    def bags_of_pairs(self, places: torch.Tensor) -> Bags:
        """Sums of each token's rows, of which that of the pair self.pairs[i] is at places[i]."""
        found = places.new_empty(self.tokens * self.top_k)
        found[self.pairs] = places
        if self.kept == len(found):
            return Bags.at(found, torch.arange(0, self.kept, self.top_k, device=found.device))
        kept = self._experts < self._count
        sizes = kept.sum(1)
        return Bags.at(found[kept.reshape(-1)], sizes.cumsum(0) - sizes)

    def to_experts(self, x: torch.Tensor) -> comm.Work[torch.Tensor]:
        """From (tokens, features) to (rows, features). To be waited for before anything else is dispatched."""
        return comm.done(x if self._alone else x.index_select(0, self._token))

    def buffer(self, like: torch.Tensor) -> torch.Tensor | None:
        """Where the rows that `to_tokens` is given next are not copied, of the dtype and features of `like`; None where
        they are anyway, or not at all. Nothing else is dispatched in between."""
        return None

    def to_tokens(self, rows: torch.Tensor) -> comm.Work[torch.Tensor]:
        """From (rows, features) to (tokens, features); likewise."""
        return comm.done(rows if self._alone else self._bags(rows))

    def weights_to_experts(self, weights: torch.Tensor) -> torch.Tensor:
        """(tokens, top_k) to (rows,)."""
        if self._alone:
            return weights.reshape(-1)
        return weights.reshape(-1).index_select(0, self.pairs)

    def weights_to_tokens(self, of_rows: torch.Tensor) -> torch.Tensor:
        """(rows,) to (tokens, top_k), 0 for pairs that are dropped."""
        if self._alone:
            return of_rows.view(-1, 1)
        return of_rows.new_zeros(self.tokens * self.top_k).index_copy_(0, self.pairs, of_rows).view(-1, self.top_k)

    def both_to_experts(self, x: torch.Tensor, weights: torch.Tensor) -> comm.Work[tuple[torch.Tensor, torch.Tensor]]:
        """What `to_experts` and `weights_to_experts` give."""
        return self.to_experts(x).then(lambda rows: (rows, self.weights_to_experts(weights)))

    def both_to_tokens(self, rows: torch.Tensor, of_rows: torch.Tensor) -> comm.Work[tuple[torch.Tensor, torch.Tensor]]:
        """What `to_tokens` and `weights_to_tokens` give."""
        return self.to_tokens(rows).then(lambda sums: (sums, self.weights_to_tokens(of_rows)))

    def _by_rank(self, of_experts: list[int]) -> list[int]:
        """Sums over each rank's experts."""
        numbers = iter(of_experts)
        return [sum(next(numbers) for _ in range(count)) for count in self.of_rank]


class AllToAll(Dispatch):
    """By messages, a row for each pair. Counts go first, so that every rank knows what comes, if anything."""

    def _arrange(self) -> None:
        axis, local = self.axis, self.of_rank[self.axis.rank]
        self.sends = self._by_rank(self._sent)
        arriving = comm.all_to_all(self.sent, axis, self.of_rank, (local,) * axis.size).view(axis.size, local)
        self._sort(arriving)
        self._token = self.pairs // self.top_k
        self._bags = self.bags_of_pairs(torch.arange(len(self.pairs), device=self.pairs.device))

    def _sort(self, arriving: torch.Tensor) -> None:
        """Rows come by rank, then expert: (ranks, local experts) of them; experts want them by expert."""
        local = arriving.shape[1]
        self.receives, self.counts = arriving.sum(1).tolist(), arriving.sum(0).tolist()
        self.rows = sum(self.receives)
        expert = torch.arange(local, device=arriving.device).repeat(self.axis.size)
        self._arrived = stable_argsort(expert.repeat_interleave(arriving.flatten()), max(1, local))
        self._leaving = torch.empty_like(self._arrived)
        self._leaving[self._arrived] = torch.arange(self.rows, device=self._arrived.device)

    def to_experts(self, x: torch.Tensor) -> comm.Work[torch.Tensor]:
        leaving = x.index_select(0, self._token)
        coming = comm.all_to_all_start(leaving, self.axis, self.sends, self.receives)
        return coming.then(lambda came: came.index_select(0, self._arrived))

    def to_tokens(self, rows: torch.Tensor) -> comm.Work[torch.Tensor]:
        leaving = rows.index_select(0, self._leaving)
        return comm.all_to_all_start(leaving, self.axis, self.receives, self.sends).then(self._bags)

    def weights_to_experts(self, weights: torch.Tensor) -> torch.Tensor:
        leaving = weights.reshape(-1).index_select(0, self.pairs)
        return comm.all_to_all(leaving, self.axis, self.sends, self.receives).index_select(0, self._arrived)

    def weights_to_tokens(self, of_rows: torch.Tensor) -> torch.Tensor:
        leaving = of_rows.index_select(0, self._leaving)
        return super().weights_to_tokens(comm.all_to_all(leaving, self.axis, self.receives, self.sends))


class Once(AllToAll):
    """By messages, a row for each rank that has experts of a token, with the places of its pairs' rows among them."""

    def _arrange(self) -> None:
        axis, tokens, device = self.axis, self.tokens, self.pairs.device
        local = self.of_rank[axis.rank]
        self.sends = self._by_rank(self._sent)
        rank = torch.repeat_interleave(torch.tensor(self.sends)).to(device)
        place = rank * tokens + self.pairs // self.top_k
        wanted = torch.zeros(axis.size * tokens, dtype=torch.bool, device=device)
        wanted[place] = True
        copies = wanted.view(axis.size, tokens).sum(1)
        self.copy_sends = copies.tolist()
        # Of each rank, its experts' pairs and then the copies
        columns = [part for pair in zip(self.sent.split(self.of_rank), copies.split(1)) for part in pair]
        numbers = [count + 1 for count in self.of_rank]
        arriving = comm.all_to_all(torch.cat(columns), axis, numbers, (local + 1,) * axis.size).view(axis.size, -1)
        self._sort(arriving[:, :local])
        self.copy_receives = arriving[:, local].tolist()
        number = wanted.cumsum(0) - 1  # of a copy among all that leave
        firsts = (copies.cumsum(0) - copies)[rank]
        of_pair = comm.all_to_all((number[place] - firsts).int(), axis, self.sends, self.receives).long()
        before = arriving[:, local].cumsum(0) - arriving[:, local]
        of_pair += before.repeat_interleave(torch.tensor(self.receives, device=device))
        self._row = of_pair[self._arrived]
        self._token = wanted.nonzero().flatten() % max(1, tokens)
        self._copies = Bags(self._row, sum(self.copy_receives))
        self._bags = Bags(self._token, tokens)

    def to_experts(self, x: torch.Tensor) -> comm.Work[torch.Tensor]:
        copies = x.index_select(0, self._token)
        coming = comm.all_to_all_start(copies, self.axis, self.copy_sends, self.copy_receives)
        return coming.then(lambda came: came.index_select(0, self._row))

    def to_tokens(self, rows: torch.Tensor) -> comm.Work[torch.Tensor]:
        copies = self._copies(rows)
        return comm.all_to_all_start(copies, self.axis, self.copy_receives, self.copy_sends).then(self._bags)


class Gather(Dispatch):
    """All tokens go to all ranks, which take those of their experts and give back sums for all tokens."""

    def _arrange(self) -> None:
        self._gather_experts()
        self._bags = Bags(self._token, sum(self.sizes))

    def _gather_experts(self) -> torch.Tensor:
        """Everybody's experts, (all tokens, top_k), of which this rank's pairs are found."""
        axis, mine = self.axis, self._experts.int()
        chosen, self.sizes = comm.workspace(axis, mine).gather_counted(mine)
        of_expert, first = self._pairs_of_experts(chosen), sum(self.of_rank[: axis.rank])
        self.counts = of_expert[first : first + self.of_rank[axis.rank]].tolist()
        self._over_ranks = tuple(self._by_rank(of_expert.tolist()))
        start, self.rows = sum(self._over_ranks[: axis.rank]), self._over_ranks[axis.rank]
        self._pairs_here = stable_argsort(chosen.view(-1), self._count + 1)[start : start + self.rows]
        self._token = self._pairs_here // self.top_k
        return chosen

    def _gathered(self, rows):
        """Everybody's; scratch memory."""
        return comm.workspace(self.axis, rows).gather(rows.contiguous(), self.sizes)

    def to_experts(self, x: torch.Tensor) -> comm.Work[torch.Tensor]:
        return comm.done(self._gathered(x).index_select(0, self._token))

    def to_tokens(self, rows: torch.Tensor) -> comm.Work[torch.Tensor]:
        return comm.done(self._reduced(self._bags(rows)))

    def weights_to_experts(self, weights: torch.Tensor) -> torch.Tensor:
        return self._gathered(weights).view(-1).index_select(0, self._pairs_here)

    def weights_to_tokens(self, of_rows: torch.Tensor) -> torch.Tensor:
        everybody = of_rows.new_zeros(sum(self.sizes) * self.top_k)
        return self._reduced(everybody.index_copy_(0, self._pairs_here, of_rows).view(-1, self.top_k))

    def _reduced(self, rows):
        workspace = comm.workspace(self.axis, rows)
        buffer = workspace.buffer(rows.numel(), rows).view(rows.shape)
        buffer.copy_(rows)
        return comm.reduce_rows(workspace, buffer, self.sizes)
