"""Every differentiable operation against its definition: literal results, and <Fx, y> = <x, F*y> over all ranks."""

import pytest
import torch

from hpctrain.comm import functional as f

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3, 4, 6)]


def dot(a, b, axis):
    """Sum over all ranks of <a, b>."""
    return axis.comm.allreduce(float((a.double() * b.double()).sum()))


def uneven(axis):
    return tuple(1 + 2 * r % 3 for r in range(axis.size))  # 1, 3, 2, 1, 3, 2, ...


def rows(n, axis, seed=0):
    return torch.randn(n, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * seed + axis.rank))


CASES = {
    "all_reduce": lambda a: (rows(4, a), lambda x: f.all_reduce(x, a)),
    "all_gather": lambda a: (rows(2, a), lambda x: f.all_gather(x, a)),
    "all_gather uneven": lambda a: (rows(uneven(a)[a.rank], a), lambda x: f.all_gather(x, a, uneven(a))),
    "all_gather untold": lambda a: (rows(uneven(a)[a.rank], a), lambda x: f.all_gather(x, a)),
    "reduce_scatter": lambda a: (rows(2 * a.size, a), lambda x: f.reduce_scatter(x, a)),
    "reduce_scatter uneven": lambda a: (rows(sum(uneven(a)), a), lambda x: f.reduce_scatter(x, a, uneven(a))),
    "broadcast": lambda a: (rows(3, a), lambda x: f.broadcast(x, a, root=a.size - 1)),
    "reduce": lambda a: (rows(3, a), lambda x: f.reduce(x, a, root=a.size - 1)),
    "gather": lambda a: (rows(uneven(a)[a.rank], a), lambda x: f.gather(x, a, uneven(a), root=a.size - 1)),
    "gather untold": lambda a: (rows(uneven(a)[a.rank], a), lambda x: f.gather(x, a, root=a.size - 1)),
    "scatter": lambda a: (
        rows(sum(uneven(a)) if a.rank == a.size - 1 else 0, a),
        lambda x: f.scatter(x, a, uneven(a), root=a.size - 1),
    ),
    "scatter, rows elsewhere": lambda a: (rows(2 * a.size, a), lambda x: f.scatter(x, a, (2,) * a.size, a.size - 1)),
    "all_to_all": lambda a: (rows(2 * a.size, a), lambda x: f.all_to_all(x, a)),
    "all_to_all uneven": lambda a: (
        # rank r sends r + s + 1 rows to rank s: as many as it receives from there
        rows(sum(a.rank + s + 1 for s in range(a.size)), a),
        lambda x: f.all_to_all(x, a, *[tuple(a.rank + s + 1 for s in range(a.size))] * 2),
    ),
    "all_to_all one way": lambda a: (
        # every rank sends s + 1 rows to rank s
        rows(sum(range(a.size + 1)), a),
        lambda x: f.all_to_all(x, a, tuple(range(1, a.size + 1)), (a.rank + 1,) * a.size),
    ),
    "all_to_all received": lambda a: (rows(2 * a.size, a), lambda x: f.all_to_all(x, a, None, (2,) * a.size)),
    "all_to_all received unevenly": lambda a: (
        # rank r sends r + 1 rows to every rank
        rows((a.rank + 1) * a.size, a),
        lambda x: f.all_to_all(x, a, recv_counts=tuple(range(1, a.size + 1))),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_adjoint(line, case):
    x, op = CASES[case](line)
    x.requires_grad_()
    fx = op(x)
    y = rows(len(fx), line, seed=1) if fx.dim() else torch.randn(())
    fx.backward(y)
    left, right = dot(fx.detach(), y, line), dot(x.detach(), x.grad, line)
    assert left == pytest.approx(right, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_second_derivative(line, case):
    """That of sum (Fx)³, times v, is F*(6 Fx Fv)."""
    x, op = CASES[case](line)
    v = rows(len(x), line, seed=2)
    x.requires_grad_()
    (first,) = torch.autograd.grad((op(x) ** 3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((first * v).sum(), x)
    (expected,) = torch.autograd.grad((3 * op(x) ** 2 * op(v)).sum(), x)
    torch.testing.assert_close(second, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(2, 3, 4, 6)
def test_send_and_recv_are_adjoint(line):
    """Rank 0 sends x to the last rank, whose y comes back as the gradient."""
    last = line.size - 1
    x = torch.arange(6.0, dtype=torch.float64).reshape(2, 3).requires_grad_()
    y = torch.full((2, 3), 0.5, dtype=torch.float64)
    if line.rank == 0:
        f.send(x, line, last, tag=3).backward()
        assert torch.equal(x.grad, y)
    elif line.rank == last:
        received = f.recv(torch.empty(2, 3, dtype=torch.float64, requires_grad=True), line, 0, tag=3)
        assert torch.equal(received, x)
        received.backward(y)


def test_literal_results(line):
    """Rank r holds r + 1 rows of value r; the answers by hand."""
    p, r = line.size, line.rank
    counts = tuple(range(1, p + 1))
    mine = torch.full((r + 1, 2), float(r), dtype=torch.float64)
    stacked = torch.cat([torch.full((q + 1, 2), float(q)) for q in range(p)]).double()
    triangle = p * (p - 1) / 2

    assert torch.equal(f.all_gather(mine, line, counts), stacked)
    assert torch.equal(f.reduce_scatter(stacked, line, counts), mine * p)
    assert torch.equal(f.all_reduce(mine[:1], line), torch.full((1, 2), triangle, dtype=torch.float64))
    assert torch.equal(f.gather(mine, line, counts), stacked if r == 0 else stacked[:0])
    assert torch.equal(f.scatter(stacked if r == 0 else stacked[:0], line, counts), mine)
    assert torch.equal(f.broadcast(mine[:1], line, root=p - 1), torch.full((1, 2), p - 1.0, dtype=torch.float64))
    assert torch.equal(f.reduce(mine[:1], line), torch.full((1, 2), triangle if r == 0 else 0.0, dtype=torch.float64))
    sent = torch.tensor([[10.0 * r + s] for s in range(p)])
    assert torch.equal(f.all_to_all(sent, line), torch.tensor([[10.0 * s + r] for s in range(p)]))


def test_operations_compose_under_autograd(line):
    """The gradient of a chain of operations equals finite differences."""
    counts = uneven(line)
    x = rows(counts[line.rank], line).requires_grad_()

    def loss(x):
        return (f.reduce_scatter(f.all_gather(x, line, counts).tanh(), line, counts) ** 2).sum()

    loss(x).backward()
    step, place = 1e-6, (0, 1)
    for rank in range(line.size):  # the total loss depends on every rank's x
        shifted = [x.detach().clone() for _ in range(2)]
        if rank == line.rank:
            shifted[0][place] += step
            shifted[1][place] -= step
        up, down = (line.comm.allreduce(float(loss(s))) for s in shifted)
        if rank == line.rank:
            assert float(x.grad[place]) == pytest.approx((up - down) / (2 * step), rel=1e-6)
