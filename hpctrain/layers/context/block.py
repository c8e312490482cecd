"""One tile of attention, forward and backward, by the fused kernel that takes it.

Forward gives the output and the natural logarithm of each query's sum of exponentials (lse) over the keys of the tile
alone. Backward is given the final output and lse, of all keys: the gradients of the tiles then only have to be added.

Source: Dao, "FlashAttention-2: faster attention with better parallelism and work partitioning" (2023), section 2.3.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from hpctrain import comm
from hpctrain.layers.context.tiles import Tile

aten = torch.ops.aten
MOST_SCORES = 1 << 22  # in memory at a time where no fused kernel keeps them in its registers


class Block(NamedTuple):
    """Queries, keys and values of a tile: (sequences, heads, length, width), of k and v a divisor of the heads.

    `keep`, for a slice of the queries, gives what their probabilities are multiplied by: a dropout mask of (sequences,
    heads, queries, keys), scaled.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    tile: Tile
    scale: float
    keep: Callable[[slice], torch.Tensor] | None = None


class Kernel(Protocol):
    """Attributes: `triangle`, queries and keys of the blocks that it computes whole where a causal tile has more; 0 for
    a kernel that computes what is seen alone."""

    triangle: int

    def forward(self, b: Block) -> tuple[torch.Tensor, torch.Tensor]: ...
    def backward(
        self, b: Block, grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


class CpuFlash:
    """torch's fused kernel for CPUs."""

    triangle = 128  # of a causal tile it computes whole blocks, of more queries and keys than these

    @staticmethod
    def forward(b: Block) -> tuple[torch.Tensor, torch.Tensor]:
        return aten._scaled_dot_product_flash_attention_for_cpu(
            b.q, b.k, b.v, 0.0, b.tile.kind == "causal", attn_mask=_bias_of(b), scale=b.scale
        )

    @staticmethod
    def backward(
        b: Block, grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, b.q, b.k, b.v, out, lse, 0.0, b.tile.kind == "causal", attn_mask=_bias_of(b), scale=b.scale
        )


class CudaFlash:
    """FlashAttention-2, for 16-bit floats without a mask. Its gradients are the same ones every time where
    torch.use_deterministic_algorithms says so."""

    triangle = 0

    @staticmethod
    def forward(b: Block):
        out, lse, *_ = aten._scaled_dot_product_flash_attention(
            b.q, b.k, b.v, 0.0, b.tile.kind == "causal", False, scale=b.scale
        )
        return out, lse

    @staticmethod
    def backward(b: Block, grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor):
        unused = torch.empty(0, dtype=torch.int64, device=b.q.device)  # of dropout, and of sequences of several lengths
        return aten._scaled_dot_product_flash_attention_backward(
            grad, b.q, b.k, b.v, out, lse.contiguous(), None, None, *b.tile.shape, 0.0, b.tile.kind == "causal",
            unused, unused, scale=b.scale,
        )  # fmt: skip


class CudaEfficient:
    """xFormers' kernel, which takes float32 and masks, and as many key heads as query heads."""

    triangle = 0
    rows = 32  # it pads lse to multiples of

    @staticmethod
    def forward(b: Block):
        k, v = (_repeated(part, b.q) for part in (b.k, b.v))
        bias, causal = _bias_of(b), b.tile.kind == "causal"
        bias = None if bias is None else bias.expand(*b.q.shape[:3], k.shape[2])
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(b.q, k, v, bias, True, 0.0, causal, scale=b.scale)
        return out, lse[..., : b.q.shape[2]]

    @classmethod
    def backward(cls, b: Block, grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor):
        k, v = (_repeated(part, b.q) for part in (b.k, b.v))
        bias, causal = _bias_of(b), b.tile.kind == "causal"
        bias = None if bias is None else bias.expand(*b.q.shape[:3], k.shape[2])
        lse = torch.nn.functional.pad(lse, (0, -lse.shape[2] % cls.rows), value=math.inf)
        unused = torch.zeros((), dtype=torch.int64, device=b.q.device)  # of dropout
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad, b.q, k, v, bias, out, lse, unused, unused, 0.0, [True, True, True, False], causal, scale=b.scale
        )
        return dq, *(part.unflatten(1, (b.k.shape[1], -1)).sum(2) for part in (dk, dv))


class Explicit:
    """Scores and probabilities written out, some rows at a time: for dropout, and for what no fused kernel takes."""

    triangle = 0

    @classmethod
    def forward(cls, b: Block):
        out = b.q.new_empty(b.q.shape, dtype=comm.accumulation_dtype(b.q.dtype))
        lse = out.new_empty(out.shape[:3])
        for rows in cls._rows(b):
            scores = cls._scores(b, rows)
            torch.logsumexp(scores, -1, out=lse[:, :, rows])
            probabilities = scores.sub_(lse[:, :, rows, None]).exp_()
            if b.keep is not None:
                probabilities *= b.keep(rows)
            out[:, :, rows] = _ungrouped(_grouped(probabilities, b) @ b.v.to(out.dtype), b)
        return out, lse

    @classmethod
    def backward(cls, b: Block, grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor):
        wide = comm.accumulation_dtype(b.q.dtype)
        q, k, v, grad = (part.to(wide) for part in (b.q, b.k, b.v, grad))
        delta = (grad * out).sum(-1, keepdim=True)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for rows in cls._rows(b):
            probabilities = cls._scores(b, rows).sub_(lse[:, :, rows, None]).exp_()
            grads = _grouped(grad[:, :, rows], b)
            d_scores = _ungrouped(grads @ v.mT, b)  # of the probabilities, first
            kept = probabilities
            if b.keep is not None:
                keep = b.keep(rows)
                kept = probabilities * keep
                d_scores *= keep
            d_scores = _grouped(d_scores.sub_(delta[:, :, rows]).mul_(probabilities).mul_(b.scale), b)
            dv += _grouped(kept, b).mT @ grads
            dk += d_scores.mT @ _grouped(q[:, :, rows], b)
            dq[:, :, rows] = _ungrouped(d_scores @ k, b)
        return dq, dk, dv

    @staticmethod
    def _rows(b: Block):
        rows, keys = b.tile.shape
        step = max(1, MOST_SCORES // max(1, b.q.shape[0] * b.q.shape[1] * keys))
        return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]

    @staticmethod
    def _scores(b: Block, rows: slice):
        wide = comm.accumulation_dtype(b.q.dtype)
        scores = _ungrouped(_grouped(b.q[:, :, rows].to(wide) * b.scale, b) @ b.k.to(wide).mT, b)
        if b.tile.kind == "full":
            return scores
        return scores.masked_fill_(~_seen(*b.tile.shape, b.tile.least, b.tile.greatest, scores.device)[rows], -math.inf)


@functools.lru_cache(maxsize=64)
def kernels_of(device: str, dtype: torch.dtype, width: int, dropout: bool) -> dict[str, Kernel]:
    """The kernel for each kind of tile, of heads of this width."""
    if dropout:
        return dict.fromkeys(("full", "causal", "masked"), Explicit)
    if device == "cpu":
        return dict.fromkeys(("full", "causal", "masked"), CpuFlash)
    if device != "cuda" or dtype == torch.float64 or width % 8 or width > 256:
        return dict.fromkeys(("full", "causal", "masked"), Explicit)
    unmasked: Kernel = CudaEfficient if dtype == torch.float32 else CudaFlash
    return {"full": unmasked, "causal": unmasked, "masked": CudaEfficient}


@functools.lru_cache(maxsize=32)
def _seen(rows: int, keys: int, least: int | None, greatest: int | None, device) -> torch.Tensor:
    seen = torch.ones(rows, keys, dtype=torch.bool, device=device)
    if greatest is not None:
        seen.tril_(greatest)
    return seen if least is None else seen.triu_(least)


def _bias_of(b: Block) -> torch.Tensor | None:
    """What a kernel adds to the scores of a tile that is neither full nor causal."""
    if b.tile.kind != "masked":
        return None
    return _bias(*b.tile.shape, b.tile.least, b.tile.greatest, b.q.dtype, b.q.device)


@functools.lru_cache(maxsize=32)
def _bias(rows, keys, least, greatest, dtype, device):
    seen = _seen(rows, keys, least, greatest, device)
    room = torch.zeros(rows, -(-keys // 16) * 16, dtype=dtype, device=device)  # rows begin at multiples of 16
    return room[:, :keys].masked_fill_(~seen, -math.inf)


def _grouped(x, b):
    """The rows of the query heads that share a key head, as one longer matrix."""
    return x.reshape(x.shape[0], b.k.shape[1], -1, x.shape[3])


def _ungrouped(x, b):
    return x.view(*b.q.shape[:2], -1, x.shape[3])


def _repeated(part, q):
    return part.repeat_interleave(q.shape[1] // part.shape[1], 1)
