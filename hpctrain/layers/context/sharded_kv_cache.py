"""Keys and values of a text that is being written, spread over the ranks that share its sequence."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import torch

from hpctrain import comm
from hpctrain.grid import Axis
from hpctrain.layers.context.attention import Context, attend
from hpctrain.layers.context.block import Block, kernels_of
from hpctrain.layers.context.merge import Merged
from hpctrain.layers.context.tiles import Tile

ALL = (slice(None),) * 3  # sequences, heads, tokens


@dataclass
class _Seen:
    """Of one layer. Attributes: `k`, `v` and their `positions`, of this rank; `counts`, how many each rank has."""

    k: torch.Tensor
    v: torch.Tensor
    positions: list[int]
    counts: list[int]


class ShardedKVCache:
    """Each rank keeps the keys and values of its part of the prompt. The tokens after it come one by one, each to all
    ranks: the rank with the fewest keeps its key and value, all attend to what they have, and from the outputs and
    their lse everybody merges the same attention, in the order of the ranks.

    A token so moves one output a layer instead of all keys and values. Nothing differentiates it.

    Args:
        sequence: the axis of the ranks, `grid.sequence`.

    Source: Dao et al., "Flash-Decoding for long-context inference" (2023), with ranks in place of thread blocks.
    """

    def __init__(self, sequence: Axis):
        self._axis = sequence
        self._seen: dict[torch.nn.Module, _Seen] = {}

    def attend(
        self, layer: torch.nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: Context
    ) -> torch.Tensor:
        """Attention of the prompt's tokens, as `context` cuts them, and of one token after the other then; shapes as of
        `context.attention.attend`. Collective."""
        if layer in self._seen:
            return self._one_token(self._seen[layer], q, k, v, context)
        mine = [position for span in context.spans[self._axis.rank] for position in span]
        self._seen[layer] = _Seen(k, v, mine, [sum(map(len, spans)) for spans in context.spans])
        return attend(q, k, v, context)

    def _one_token(self, seen, q, k, v, context):
        ((position,),) = context.spans[self._axis.rank]
        keeper = seen.counts.index(min(seen.counts))
        seen.counts[keeper] += 1
        if keeper == self._axis.rank:
            seen.k, seen.v = (torch.cat(parts, 2) for parts in ((seen.k, k), (seen.v, v)))
            seen.positions.append(position)
        if not q.numel():  # of no sequence, or no head
            return q
        window = context.masks[0].window
        first = bisect_left(seen.positions, position - window + 1) if window else 0
        merged = Merged(q)
        if count := len(seen.positions) - first:
            block = Block(
                q, seen.k[:, :, first:], seen.v[:, :, first:], Tile(slice(0, 1), slice(0, count)), context.scale
            )
            kernel = kernels_of(q.device.type, q.dtype, q.shape[3], False)["full"]
            merged.add(ALL, *kernel.forward(block))
        mine = torch.cat((merged.out, merged.lse.unsqueeze(-1)), -1)
        whole = Merged(q)
        for part in comm.all_gather(mine.unsqueeze(0), self._axis):
            whole.add(ALL, part[..., :-1], part[..., -1])
        return whole.out.to(q.dtype)
