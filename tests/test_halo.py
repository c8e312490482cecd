"""Halo exchange: literal rows, the adjoint identity, and bytes, with thin and empty blocks."""

import pytest
import torch

from hpctrain.comm import Halo
from hpctrain.comm import functional as f
from hpctrain.shard import split

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3, 4, 6)]


def halo(axis, length, above, below, stride=1, fill=0.0):
    """Rank r needs rows start·stride - above to stop·stride + below for its range [start, stop) of the length."""
    held = tuple(split(length, axis.size, r) for r in range(axis.size))
    needed = tuple(
        slice(s.start * stride - above, s.stop * stride + below) if s.stop > s.start else slice(0, 0) for s in held
    )
    return Halo(axis, held, needed, fill=fill)


def image(axis, length, value=lambda row: row):
    """(2, 3, held rows, 2) of whole rows, each filled with a value."""
    rows = split(length, axis.size, axis.rank)
    whole = torch.stack([torch.full((2, 3, 2), float(value(row)), dtype=torch.float64) for row in range(length)], 2)
    return whole[:, :, rows]


SHAPES = [(16, 1, 1, 1), (7, 2, 1, 1), (3, 1, 2, 1), (5, 6, 7, 1), (9, 0, 0, 2), (6, -1, 0, 1), (1, 3, 3, 1)]


@pytest.mark.parametrize(("length", "above", "below", "stride"), SHAPES)
def test_rows(line, length, above, below, stride):
    plan = halo(line, length, above, below, stride, fill=-7.0)
    got = f.halo(image(line, length), plan)
    wanted = range(plan.needed[line.rank].start, plan.needed[line.rank].stop)
    expected = [float(row) if 0 <= row < length else -7.0 for row in wanted]
    assert got.shape == (2, 3, len(wanted), 2)
    assert (got == torch.tensor(expected, dtype=torch.float64)[:, None]).all()


@pytest.mark.parametrize(("length", "above", "below", "stride"), SHAPES)
def test_adjoint(line, length, above, below, stride):
    plan = halo(line, length, above, below, stride)
    x = image(line, length)
    generator = torch.Generator().manual_seed(line.rank)
    x = torch.randn(x.shape, dtype=x.dtype, generator=generator).requires_grad_()
    fx = f.halo(x, plan)
    y = torch.randn(fx.shape, dtype=x.dtype, generator=generator)
    fx.backward(y)
    left, right = (line.comm.allreduce(float((a * b).sum())) for a, b in ((fx.detach(), y), (x.detach(), x.grad)))
    assert left == pytest.approx(right, rel=1e-12, abs=1e-12)
    # A row's gradient is as many times one as there are ranks that needed it.
    copies = torch.zeros(length, dtype=torch.float64)
    for part in plan.needed:
        copies[max(part.start, 0) : max(part.stop, 0)] += 1
    ones = plan.adjoint(torch.ones_like(y))
    assert (ones == copies[plan.local[line.rank]][:, None]).all()


def test_bytes_and_neighbours(line):
    """Each rank of four rows receives one row from each neighbour: 2·3·2 numbers of 8 bytes, and returns as many."""
    plan = halo(line, 4 * line.size, 1, 1)
    neighbours = min(line.size - 1, 2 if 0 < line.rank < line.size - 1 else 1)
    for move, x in ((plan.exchange, image(line, 4 * line.size)), (plan.adjoint, torch.zeros(2, 3, 6, 2).double())):
        line.transport.traffic.clear()
        move(x)
        assert line.transport.traffic.total("received") == line.transport.traffic.total("sent") == neighbours * 12 * 8


def test_any_dim_and_layout(line):
    """The width of a transposed view, which is not contiguous."""
    whole = torch.arange(5.0 * 6 * 2).view(6, 5, 2).transpose(0, 2)  # (2, 5, 6), spread over its last dim
    held = tuple(split(6, line.size, r) for r in range(line.size))
    plan = Halo(line, held, (slice(1, 6),) * line.size, dim=2)
    assert torch.equal(plan.exchange(whole[..., held[line.rank]]), whole[..., 1:])
    over_rows = Halo(line, tuple(split(5, line.size, r) for r in range(line.size)), (slice(0, 4),) * line.size, dim=1)
    assert torch.equal(over_rows.exchange(whole[:, over_rows.local[line.rank]]), whole[:, :4])
