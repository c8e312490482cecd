"""Products of float32 matrices by oneDNN, in place of MKL, which torch.mm calls.

On an AVX-512 processor that is not Intel's MKL takes its AVX2 kernels: oneDNN's are strict float32 too, and up to 2.5
times as fast on an AMD EPYC (Zen 5).
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch

_PROBE = 64  # rows and columns, more than those of which torch does not ask oneDNN


@functools.cache
def is_faster() -> bool:
    """Whether this processor has vector instructions that MKL leaves to Intel's, and torch can be asked for oneDNN's
    products, which are strict here."""
    known = torch.backends.mkldnn.is_available() and hasattr(torch.backends.mkldnn, "matmul")
    return known and torch.backends.cpu.get_cpu_capability() == "AVX512" and not _intel() and not _rounds()


def _rounds() -> bool:
    """Whether bfloat16 is inside its products here."""
    exact = torch.full((_PROBE, _PROBE), 1 + torch.finfo(torch.float32).eps)
    with Float32("bf16"):
        return not torch.equal(exact @ torch.eye(_PROBE), exact)


def _intel() -> bool:
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:  # another system than Linux
        return True


class Float32:
    """Inside, torch.mm takes oneDNN's float32 products, or MKL's, whatever torch.set_float32_matmul_precision says.

    What asks for oneDNN's, as "medium" does, permits bfloat16 inside them, for which it has kernels where a processor
    has matrix registers (AMX) alone: `is_faster` makes sure that here they round nothing, whoever takes them. It
    is the one way to them that takes matrices as they lie and writes results where they belong.
    """

    def __init__(self, *precisions: str):
        self._precisions = precisions  # any of these will do

    def __enter__(self) -> None:
        self._matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
        self._before = self._matmul.fp32_precision
        if self._before not in self._precisions:
            self._matmul.fp32_precision = self._precisions[0]

    def __exit__(self, *error: object) -> None:
        if self._before not in self._precisions:
            self._matmul.fp32_precision = self._before


def product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """a @ b + bias, without a gradient. oneDNN compiles a kernel for each new size, once, in half a millisecond."""
    return torch.ops.mkldnn._linear_pointwise(a, b.t(), bias, "none", [], "")
