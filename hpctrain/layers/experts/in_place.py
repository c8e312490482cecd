"""The dispatch of one node, whose ranks read rows where others have written them."""

from __future__ import annotations

import torch

from hpctrain import comm
from hpctrain.comm.shared_memory_workspace import SharedMemoryWorkspace
from hpctrain.layers.experts.dispatch import Gather


class InPlace(Gather):
    """On one node: rows are written once, where they are, and read there by whom they are for."""

    def _arrange(self) -> None:
        chosen, rank = self._gather_experts(), self.axis.rank
        first = sum(self.sizes[:rank])
        # Rows of all ranks lie expert by expert, in these rank by rank; this rank's pairs expert by expert
        earlier, later = (self._pairs_of_experts(part) for part in (chosen[:first], chosen[first + self.tokens :]))
        before = earlier.cumsum(0) + later.cumsum(0) - later
        self._places = torch.arange(self.kept) + before.repeat_interleave(self.sent)
        self._bags = self.bags_of_pairs(self._places)
        self._own = self._by_rank(self._sent)[rank]

    def to_experts(self, x: torch.Tensor) -> comm.Work[torch.Tensor]:
        return self._read([x], self.sizes, _row(x)).then(lambda of_all: self._rows_here(*of_all))

    def buffer(self, like: torch.Tensor) -> torch.Tensor:
        return self._shared(like).read_buffer(like, self._over_ranks, like.shape[1])

    def to_tokens(self, rows: torch.Tensor) -> comm.Work[torch.Tensor]:
        return self._read([rows], self._over_ranks, _row(rows)).then(lambda of_all: self._bags(*of_all))

    def weights_to_experts(self, weights: torch.Tensor) -> torch.Tensor:
        return self._weights_here(*self._read([weights], self.sizes, weights.itemsize).wait())

    def weights_to_tokens(self, of_rows: torch.Tensor) -> torch.Tensor:
        return self._weights_back(*self._read([of_rows], self._over_ranks, of_rows.itemsize).wait())

    def both_to_experts(self, x: torch.Tensor, weights: torch.Tensor) -> comm.Work[tuple[torch.Tensor, torch.Tensor]]:
        coming = self._read([x, weights], self.sizes, _row(x) + weights.itemsize)
        return coming.then(lambda of_all: (self._rows_here(of_all[0]), self._weights_here(of_all[1])))

    def both_to_tokens(self, rows: torch.Tensor, of_rows: torch.Tensor) -> comm.Work[tuple[torch.Tensor, torch.Tensor]]:
        coming = self._read([rows, of_rows], self._over_ranks, _row(rows) + of_rows.itemsize)
        return coming.then(lambda of_all: (self._bags(of_all[0]), self._weights_back(of_all[1])))

    def _rows_here(self, of_tokens):
        return of_tokens.index_select(0, self._token)

    def _weights_here(self, of_tokens):
        return of_tokens.view(-1).index_select(0, self._pairs_here)

    def _weights_back(self, of_rows):
        own = of_rows.index_select(0, self._places)
        return own.new_zeros(self.tokens * self.top_k).index_copy_(0, self.pairs, own).view(-1, self.top_k)

    def _read(self, parts: list[torch.Tensor], counts: tuple[int, ...], of_pair: int) -> comm.Work[list[torch.Tensor]]:
        """All ranks' rows of each, tokens' or experts', of which a pair has so many bytes."""
        away, here = self.kept - self._own, self.rows - self._own
        sent, received = (away, here) if counts is self.sizes else (here, away)
        parts = [part.contiguous() for part in parts]
        return self._shared(parts[0]).read_start(parts, counts, sent * of_pair, received * of_pair)

    def _shared(self, like: torch.Tensor) -> SharedMemoryWorkspace:
        found = comm.workspace(self.axis, like)
        assert isinstance(found, SharedMemoryWorkspace)
        return found


def _row(matrix: torch.Tensor) -> int:
    """Bytes."""
    return matrix.shape[1] * matrix.itemsize
