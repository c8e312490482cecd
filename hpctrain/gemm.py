"""Products of two matrices of one process: torch's, which are MKL's, or in float32 oneDNN's where these are faster.

On an AVX-512 processor that is not Intel's MKL takes its AVX2 kernels: oneDNN's are strict float32 too, and up to 2.3
times as fast on an AMD EPYC (Zen 5), once they have been compiled, which takes half a millisecond for each new size.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

PAYS = 3 << 19  # multiplications below which a call of oneDNN takes as long as one of MKL
_VECTORS = 4  # with a dim below, MKL reads the matrices as fast as memory gives them
_PROBE = 64  # rows and columns, more than those of which torch does not ask oneDNN


@functools.cache
def is_faster() -> bool:
    """Whether this processor has vector instructions that MKL leaves to Intel's, and torch can be asked for oneDNN's
    products, which are strict here."""
    known = torch.backends.mkldnn.is_available() and hasattr(torch.backends.mkldnn, "matmul")
    return known and torch.backends.cpu.get_cpu_capability() == "AVX512" and not _intel() and not _rounds()


def _rounds() -> bool:
    """Whether bfloat16 is inside its products here."""
    options: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}  # whatever torch's defaults are
    exact = torch.full((_PROBE, _PROBE), 1 + torch.finfo(torch.float32).eps, **options)
    with Float32("bf16"):
        return not torch.equal(exact @ torch.eye(_PROBE, **options), exact)


def _intel() -> bool:
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:  # another system than Linux
        return True


def refuse_autocast(x: torch.Tensor, rule: str, instead: str) -> None:
    """Raise ValueError within torch.autocast, which would change the types of mm, and not those of mm(out=...).

    Args:
        rule: which types are computed in.
        instead: what would do.
    """
    if torch.is_autocast_enabled(x.device.type):
        raise ValueError(f"{rule}, got a call within torch.autocast: leave it out, and {instead}")


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


def mm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """torch.mm, to rounding."""
    if _pays(a, b):
        with Float32("bf16"):
            return torch.mm(a, b, out=out)
    return torch.mm(a, b, out=out)


def addmm(plus: torch.Tensor, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """torch.addmm, plus + a b, to rounding."""
    if _pays(a, b):
        with Float32("bf16"):
            return torch.addmm(plus, a, b, out=out)
    return torch.addmm(plus, a, b, out=out)


def _pays(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not (is_faster() and a.dtype is torch.float32 and a.is_cpu):
        return False
    (m, k), n = a.shape, b.shape[1]
    return m * k * n >= PAYS and min(m, k, n) >= _VECTORS
