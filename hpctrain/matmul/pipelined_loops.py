"""The two loops over panels: the dim that is cut into panels is summed over, or is one of the result's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hpctrain import comm, gemm
from hpctrain.matmul.operands import Gathered, Operand
from hpctrain.matmul.results import Result, WholeSum, add_product


def contract(
    left: Operand, right: Operand, shape: Sequence[int], transpose: bool = False, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The product of two operands whose panels meet in the dim that is summed over; of left's transpose if asked."""
    if isinstance(left, Gathered) and isinstance(right, Gathered):
        return gemm.mm(left.whole.t() if transpose else left.whole, right.whole, out)
    like = next(each.block for each in (left, right) if not isinstance(each, Gathered))
    wide = comm.accumulation_dtype(like.dtype)
    total = torch.zeros(shape, dtype=wide, device=like.device)
    steps = len(left.order)
    for step in range(-1, steps):
        if step + 1 < steps:
            left.start(step + 1)
            right.start(step + 1)
        if step >= 0:
            a = left.take(step)
            add_product(total, a.t() if transpose else a, right.take(step))
    left.finish()
    right.finish()
    return total.to(like.dtype) if out is None else out.copy_(total)


def map_panels(
    source: Operand, target: Result, factors: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
) -> torch.Tensor:
    """Products with each panel of `source`, summed into `target`; `factors` makes the two factors from the panel."""
    if isinstance(source, Gathered) and isinstance(target, WholeSum):
        gemm.mm(*factors(source.whole), out=target.partial)
        return target.finish()
    steps = len(source.order)
    for step in range(-1, steps):
        if step + 1 < steps:
            source.start(step + 1)
        if step >= 0:
            target.start(step)
            target.multiply(step, *factors(source.take(step)))
        if step >= 1:
            target.collect(step - 1)
    if steps:
        target.collect(steps - 1)
    source.finish()
    return target.finish()
