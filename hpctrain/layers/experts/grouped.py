"""Products of rows that are sorted by expert with the weights of each, by the fastest kernel that torch has for them.

grouped_mm   one kernel for all experts, of bfloat16 on a GPU of compute capability 9 or more
onednn       in float32 on some processors (gemm.py)
mm           one call for each expert
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from hpctrain import gemm

_SIZES = 16  # numbers of rows in each octave: oneDNN compiles a kernel for each, once, which takes a millisecond


def products(
    rows: torch.Tensor, weight: torch.Tensor, counts: Sequence[int], transposed: bool, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Of the next counts[e] rows with weight[e] (out, in), or with its transpose for rows of `in` elements; written to
    `out` where that is given."""
    matrices, kernel = weight.mT if transposed else weight, choose(rows, weight)
    if kernel == "grouped_mm":
        found = F.grouped_mm(rows, matrices, offs=_ends(counts, rows))
        return found if out is None else out.copy_(found)
    total, width = len(rows), matrices.shape[2]
    result = rows.new_empty(total, width) if out is None else out
    fast, rest = [], []
    pays, start = -(-gemm.PAYS // max(1, width * matrices.shape[1])), 0
    for matrix, count in zip(matrices.unbind(), counts):
        end, first = start + count, start
        if kernel == "onednn" and count >= pays:
            # With some rows of the experts after it, whose own products come later
            size = _up(count) if start + _up(count) <= total else _down(count)
            fast.append((start, start + size, matrix))
            first += size
        if first < end:
            rest.append((first, end, matrix))
        start = end
    for each, by in ((fast, "onednn"), (rest, "mkl" if kernel == "onednn" else kernel)):
        if each:
            with _kernels(by):
                for first, end, matrix in each:
                    torch.mm(rows[first:end], matrix, out=result[first:end])
    return result


def weight_gradients(grad: torch.Tensor, rows: torch.Tensor, counts: Sequence[int], out: torch.Tensor) -> torch.Tensor:
    """Of each expert gradᵀ rows, (out, in), written to `out`: 0 where there are no rows."""
    kernel = choose(rows, out)
    if kernel == "grouped_mm":
        out.copy_(F.grouped_mm(grad.mT, rows, offs=_ends(counts, rows)))
        for expert, count in enumerate(counts):
            if not count:
                out[expert].zero_()
        return out
    fast: list[tuple[int, int, torch.Tensor, bool]] = []
    rest: list[tuple[int, int, torch.Tensor, bool]] = []
    pays, start = -(-gemm.PAYS // max(1, out.shape[1] * out.shape[2])), 0
    for to, count in zip(out.unbind(), counts):
        end, size = start + count, _down(count)
        if kernel == "onednn" and size >= pays:
            fast.append((start, start + size, to, False))
            if size < count:
                rest.append((start + size, end, to, True))
        else:
            rest.append((start, end, to, False))
        start = end
    grad = grad.t()
    for each, by in ((fast, "onednn"), (rest, "mkl" if kernel == "onednn" else kernel)):
        if each:
            with _kernels(by):
                for first, end, to, added in each:
                    if added:
                        to.addmm_(grad[:, first:end], rows[first:end])
                    else:
                        torch.mm(grad[:, first:end], rows[first:end], out=to)
    return out


def choose(rows: torch.Tensor, weight: torch.Tensor) -> str:
    """The kernel, for weights of (experts, out, in)."""
    if rows.is_cpu:
        return "onednn" if rows.dtype is torch.float32 and gemm.is_faster() else "mm"
    aligned = all(length and length * rows.itemsize % 16 == 0 for length in weight.shape[1:])
    if rows.is_cuda and rows.dtype is torch.bfloat16 and aligned:
        return "grouped_mm" if torch.cuda.get_device_capability(rows.device) >= (9, 0) else "mm"
    return "mm"


def _kernels(kernel: str) -> contextlib.AbstractContextManager:
    if kernel == "onednn":
        return gemm.Float32("bf16")
    return gemm.Float32("ieee", "none") if kernel == "mkl" else contextlib.nullcontext()


def _down(rows: int) -> int:
    """The number of rows below for which oneDNN has a kernel, or this one.

    >>> [_down(rows) for rows in (0, 1, 31, 33, 127, 128, 1000)]
    [0, 1, 31, 32, 124, 128, 992]
    """
    return rows - rows % max(1, (1 << rows.bit_length() >> 1) // _SIZES)


def _up(rows: int) -> int:
    """The one above.

    >>> [_up(rows) for rows in (0, 1, 31, 33, 127, 128, 1000)]
    [0, 1, 31, 34, 128, 128, 1024]
    """
    return rows + -rows % max(1, (1 << rows.bit_length() >> 1) // _SIZES)


def _ends(counts: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(list(itertools.accumulate(counts)), dtype=torch.int32, device=like.device)
