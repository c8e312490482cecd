"""The border between whole and divided: literal results, and <Fx, y> = <x, F*y>."""

import pytest
import torch
from parallelize_checks import numbers

from hpctrain.convert.boundary import enter, gather, leave, take

pytestmark = pytest.mark.mpi


def uneven(axis):
    return tuple((2 * r + 1) % 4 for r in range(axis.size))  # 1, 3, 1, 3, ...


def whole(*shape):
    return numbers(*shape, seed=1)


def part(axis, *shape):
    return numbers(*shape, seed=2 + axis.rank)


# x, F, y, and whether x and y are whole (the same on every rank, counted once) or divided (summed over ranks)
CASES = {
    "enter": lambda a: (whole(2, 3), lambda x: enter(x, a), part(a, 2, 3), True, False),
    "leave": lambda a: (part(a, 2, 3), lambda x: leave(x, a), whole(2, 3), False, True),
    "take": lambda a: (
        whole(2, sum(uneven(a)), 3), lambda x: take(x, a, uneven(a), 1), part(a, 2, uneven(a)[a.rank], 3), True, False,
    ),
    "gather": lambda a: (
        part(a, 2, uneven(a)[a.rank], 3), lambda x: gather(x, a, uneven(a), 1), whole(2, sum(uneven(a)), 3),
        False, True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_adjoint(line, case):
    x, operation, y, x_whole, y_whole = CASES[case](line)
    x.requires_grad_()
    fx = operation(x)
    fx.backward(y)

    def product(a, b, is_whole):
        here = float((a.detach() * b).sum())
        return here if is_whole else line.comm.allreduce(here)

    assert product(fx, y, y_whole) == pytest.approx(product(x, x.grad, x_whole), rel=1e-12)
    if x_whole:
        assert all(torch.equal(x.grad, other) for other in line.comm.allgather(x.grad))


def test_results(line):
    size, rank = line.size, line.rank
    mine = torch.full((2, 1), float(rank))
    assert torch.equal(gather(mine, line, (1,) * size, 1), torch.arange(float(size)).expand(2, size))
    assert torch.equal(take(torch.arange(float(size)).expand(2, size), line, (1,) * size, 1), mine)
    assert torch.equal(leave(mine, line), torch.full((2, 1), size * (size - 1) / 2))
    assert torch.equal(enter(mine, line), mine)
