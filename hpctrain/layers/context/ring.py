"""Ring attention: each rank keeps its queries, and the keys and values of all others come by.

Source: Liu, Zaharia and Abbeel, "Ring attention with blockwise transformers for near-infinite context" (2023); causal
balance by zigzag spans.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hpctrain import comm
from hpctrain.grid import Axis
from hpctrain.layers.context.block import Block, kernels_of
from hpctrain.layers.context.dropout import DropoutMasks
from hpctrain.layers.context.heads import Heads
from hpctrain.layers.context.mask import Mask
from hpctrain.layers.context.merge import Merged
from hpctrain.layers.context.spans import Spans, part_of, span_length
from hpctrain.layers.context.tiles import Tile, tiles

Place = tuple[slice, slice, slice]  # sequences, heads, tokens


@dataclass(frozen=True)
class RingAttention:
    """Attention of the heads that all ranks of a ring axis have, each with its tokens of the same sequences.

    Attributes:
        spans: positions that each rank of `axis` holds of every sequence.
        length: of the whole sequences.
        masks: who sees whom in which of the sequences.
        groups: heads, in parts that share their key and value heads evenly.
        first_head: number of the first of the heads, for `dropout`.
        gather: keys and values that go by messages come all at once, not hop by hop.
    """

    axis: Axis
    spans: tuple[Spans, ...]
    length: int
    masks: tuple[tuple[slice, Mask], ...]
    groups: tuple[Heads, ...]
    scale: float
    dropout: DropoutMasks | None = None
    first_head: int = 0
    gather: bool = False

    def forward(self, q: torch.Tensor, kv: torch.Tensor) -> Merged:
        """Of queries (sequences, heads, tokens, width), keys and values (2, sequences, kv heads, tokens, width)."""
        merged, kernels = Merged(q), self._kernels(q)
        rotation = self._rotate(kv)
        for owner, block in rotation:
            for place, _, tile in self._blocks(q, kv, owner, block, kernels):
                merged.add(place, *kernels[tile.tile.kind].forward(tile))
                rotation.progress()
        return merged

    def backward(
        self, q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of q and kv, of those of the output, `grad`; `out` and `lse` are the final ones."""
        wide = comm.accumulation_dtype(q.dtype)
        dq, kernels = torch.zeros_like(q, dtype=wide), self._kernels(q)
        rotation = self._rotate(kv, wide)
        for owner, block in rotation:
            for place, kv_place, tile in self._blocks(q, kv, owner, block, kernels):
                grads = kernels[tile.tile.kind].backward(tile, grad[place], out[place], lse[place])
                dk, dv = rotation.sum().view(self._shape(kv, owner))
                for total, part in zip((dq[place], dk[kv_place], dv[kv_place]), grads):
                    total += part
                del grads, part  # before the next tile's are made
                rotation.progress()
        return dq, rotation.total().view(kv.shape)

    def _rotate(self, kv, sum_dtype=None):
        counts = tuple(self._shape(kv, rank).numel() for rank in range(self.axis.size))
        return comm.workspace(self.axis, kv, "attention").rotate(kv.view(-1), counts, sum_dtype, self.gather)

    def _shape(self, kv, owner):
        return torch.Size((*kv.shape[:3], span_length(self.spans[owner]), kv.shape[4]))

    def _kernels(self, q):
        return kernels_of(q.device.type, q.dtype, q.shape[3], self.dropout is not None)

    def _blocks(self, q, kv, owner, block, kernels) -> Iterator[tuple[Place, Place, Block]]:
        """What is to compute with an owner's keys and values: where its queries and keys are, and the tile."""
        k, v = block.view(self._shape(kv, owner))
        queries, keys = self.spans[self.axis.rank], self.spans[owner]
        for sequences, mask in self.masks:
            for heads, kv_heads in self.groups:
                for tile in tiles(queries, keys, mask, self.length, kernels["causal"].triangle):
                    place, kv_place = (sequences, heads, tile.queries), (sequences, kv_heads, tile.keys)
                    keep = self._keep(self.dropout, sequences, heads, tile, keys, q) if self.dropout else None
                    yield place, kv_place, Block(q[place], k[kv_place], v[kv_place], tile, self.scale, keep)

    def _keep(self, dropout: DropoutMasks, sequences, heads, tile: Tile, keys, q):
        queries = part_of(self.spans[self.axis.rank], tile.queries.start, tile.queries.stop)
        keys = part_of(keys, tile.keys.start, tile.keys.stop)
        heads = slice(self.first_head + heads.start, self.first_head + heads.stop)
        like = q.new_empty(0, dtype=comm.accumulation_dtype(q.dtype))

        def keep(rows):
            return dropout.factors(sequences, heads, part_of(queries, rows.start, rows.stop), keys, like)

        return keep
