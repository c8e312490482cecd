"""Products of rows that are sorted by expert with the weights of each, by the fastest kernel that torch has for them.

grouped_mm   one kernel for all experts, of bfloat16 on a GPU of compute capability 9 or more
onednn       in float32 on an AVX-512 processor that is not Intel's, where MKL, which torch.mm calls, takes its
             AVX2 kernels: oneDNN's are strict float32 too, and 2.5 times as fast on an AMD EPYC (Zen 5)
mm           one call for each expert
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

_PAYS = 1 << 23  # multiplications below which calls of oneDNN, new kernels among them, take longer than those of MKL
_SIZES = 16  # of a product in each octave: oneDNN compiles a kernel for each, which takes up to a millisecond


def products(rows: torch.Tensor, weight: torch.Tensor, counts: Sequence[int], transposed: bool) -> torch.Tensor:
    """Of the next counts[e] rows with weight[e] (out, in), or with its transpose for rows of `in` elements."""
    matrices, kernel = weight.mT if transposed else weight, choose(rows, weight)
    if kernel == "grouped_mm":
        return F.grouped_mm(rows, matrices, offs=_ends(counts, rows))
    out = rows.new_empty(len(rows), matrices.shape[2])
    for expert, part in _parts(counts):
        a, b, to = rows[part], matrices[expert], out[part]
        if fast := _by_onednn(len(a), b.numel()) if kernel == "onednn" else 0:
            to[:fast] = _onednn(a[:fast], b)
            a, to = a[fast:], to[fast:]
        torch.mm(a, b, out=to)
    return out


def weight_gradients(grad: torch.Tensor, rows: torch.Tensor, counts: Sequence[int], out: torch.Tensor) -> torch.Tensor:
    """Of each expert gradᵀ rows, (out, in), written to `out`: 0 where there are no rows."""
    kernel = choose(rows, out)
    if kernel == "grouped_mm":
        out.copy_(F.grouped_mm(grad.mT, rows, offs=_ends(counts, rows)))
        for expert, count in enumerate(counts):
            if not count:
                out[expert].zero_()
        return out
    for expert, part in _parts(counts):
        a, b, to = grad[part].t(), rows[part], out[expert]
        if fast := _by_onednn(len(b), to.numel()) if kernel == "onednn" else 0:
            to.copy_(_onednn(a[:, :fast], b[:fast]))
            torch.addmm(to, a[:, fast:], b[fast:], out=to)
        else:
            torch.mm(a, b, out=to)
    return out


def choose(rows: torch.Tensor, weight: torch.Tensor) -> str:
    """The kernel, for weights of (experts, out, in)."""
    aligned = all(length and length * rows.itemsize % 16 == 0 for length in weight.shape[1:])
    if rows.is_cuda and rows.dtype is torch.bfloat16 and aligned:
        return "grouped_mm" if torch.cuda.get_device_capability(rows.device) >= (9, 0) else "mm"
    return "onednn" if rows.is_cpu and rows.dtype is torch.float32 and onednn_is_faster() else "mm"


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


def _by_onednn(rows: int, numel: int) -> int:
    """How many of the rows oneDNN multiplies with a matrix of `numel` elements: of few different numbers.

    >>> [_by_onednn(rows, 1 << 16) for rows in (0, 127, 128, 129, 1000, 1023, 1024)]
    [0, 0, 128, 128, 992, 992, 1024]
    """
    step = max(1, (1 << rows.bit_length() >> 1) // _SIZES)
    fast = rows // step * step
    return fast if fast * numel >= _PAYS else 0


def _ends(counts: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(list(itertools.accumulate(counts)), dtype=torch.int32, device=like.device)


def _parts(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    start = 0
    for expert, count in enumerate(counts):
        yield expert, slice(start, start + count)
        start += count
