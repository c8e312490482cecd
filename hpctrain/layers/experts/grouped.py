"""Products of rows that are sorted by expert with the weights of each, by the fastest kernel that torch has for them.

grouped_mm   one kernel for all experts, of bfloat16 on a GPU of compute capability 9 or more
onednn       in float32 on an AVX-512 processor that is not Intel's, where MKL, which torch.mm calls, takes its
             AVX2 kernels: oneDNN's are strict float32 too, and up to 2.5 times as fast on an AMD EPYC (Zen 5)
mm           one call for each expert
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

_PAYS = 1 << 22  # multiplications below which a call of oneDNN takes as long as one of MKL
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
    result = rows.new_empty(len(rows), matrices.shape[2]) if out is None else out
    starts = itertools.accumulate(counts, initial=0)
    parts = rows.split_with_sizes(counts), matrices.unbind(), result.split_with_sizes(counts)
    for start, a, b, to in zip(starts, *parts):
        if kernel == "onednn" and len(a) * b.numel() >= _PAYS:
            size = _up(len(a)) if _up(len(a)) <= len(rows) else _down(len(a))
            first, fast = min(start, len(rows) - size), min(size, len(a))
            found = _onednn(rows[first : first + size], b)  # with some rows of others
            if out is None and fast == len(rows):
                return found
            to[:fast] = found.narrow(0, start - first, fast)
            a, to = a[fast:], to[fast:]
        if len(a):
            torch.mm(a, b, out=to)
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
    for a, b, to in zip(grad.t().split_with_sizes(counts, 1), rows.split_with_sizes(counts), out.unbind()):
        fast = _down(len(b))
        if kernel == "onednn" and fast * to.numel() >= _PAYS:
            to.copy_(_onednn(a[:, :fast], b[:fast]))
            if fast < len(b):
                torch.addmm(to, a[:, fast:], b[fast:], out=to)
        else:
            torch.mm(a, b, out=to)
    return out


def choose(rows: torch.Tensor, weight: torch.Tensor) -> str:
    """The kernel, for weights of (experts, out, in)."""
    if rows.is_cpu:
        return "onednn" if rows.dtype is torch.float32 and onednn_is_faster() else "mm"
    aligned = all(length and length * rows.itemsize % 16 == 0 for length in weight.shape[1:])
    if rows.is_cuda and rows.dtype is torch.bfloat16 and aligned:
        return "grouped_mm" if torch.cuda.get_device_capability(rows.device) >= (9, 0) else "mm"
    return "mm"


@functools.cache
def onednn_is_faster() -> bool:
    """Whether this processor has vector instructions that MKL leaves to Intel's."""
    return torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512" and not _intel()


def _intel() -> bool:
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:  # another system than Linux
        return True


def _onednn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b."""
    return torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")


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
