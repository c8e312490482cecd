"""Products into a divided unit and out of it, in one step with their messages, beside the steps one by one."""

import pytest
import torch
from parallelize_checks import numbers

import hpctrain as ht
from hpctrain.comm import out_of_place
from hpctrain.convert import boundary_products, linear
from hpctrain.convert.boundary_products import entering, leaving
from hpctrain.convert.sharded_activation import ShardedActivation, rows_of, sharded
from hpctrain.shard import split

pytestmark = pytest.mark.mpi
CLOSE = {"rtol": 1e-12, "atol": 1e-12}
TOKENS, WIDE, HIDDEN = (2, 5), 6, 7  # 10 rows: 3, 3, 2 and 2 of 4 ranks


@pytest.fixture(params=["messages", "shared memory"], autouse=True)
def path(request, monkeypatch):
    """Of whole activations, of which those that are small go by messages."""
    monkeypatch.setattr(out_of_place, "SMALL", 0 if request.param == "shared memory" else 1 << 30)


@pytest.fixture
def line(world):
    return ht.Grid(tensor=world.size).tensor


@pytest.fixture
def steps(monkeypatch):
    """What was multiplied one by one."""
    found = []

    def noted(function):
        return lambda *given: found.append(function.__name__) or function(*given)

    for function in (linear.linear, linear.linears):
        monkeypatch.setattr(boundary_products, function.__name__, noted(function))
    return found


def outside(axis, divided, seed):
    """An activation, alike on all ranks, or this rank's rows of it."""
    x = numbers(*TOKENS, WIDE, seed=seed)
    rows = (rows_of(x.shape, axis).take(x.flatten(0, 1)) if divided else x).clone().requires_grad_()
    return rows, sharded(rows, axis, x.shape) if divided else rows


def into(axis, divided):
    """Of several layers, one without a bias, one that is frozen, one of no features on the last rank."""
    rows, x = outside(axis, divided, 1)
    widths = 3, 2, int(axis.rank + 1 < axis.size)
    weights = [numbers(n, WIDE, seed=9 * axis.rank + n).requires_grad_(n != 2) for n in widths]
    biases = [numbers(n, seed=9 * axis.rank + n + 5).requires_grad_() for n in widths]
    layers = [(weights[0], None), *zip(weights[1:], biases[1:])]
    return [rows, weights[0], *weights[2:], *biases[1:]], lambda: entering(x, layers, axis)


def out_of(axis, divided, with_bias=True):
    part = split(HIDDEN, axis.size, axis.rank)
    x = numbers(*TOKENS, HIDDEN, seed=2)[..., part].requires_grad_()  # not contiguous
    weight = numbers(WIDE, HIDDEN, seed=3)[:, part].clone().requires_grad_()
    of_bias = split(WIDE, axis.size, axis.rank)
    bias = numbers(WIDE, seed=4)[of_bias].clone().requires_grad_() if with_bias else None

    def call():
        y = leaving(x, weight, bias, of_bias.start, axis, divided)
        assert isinstance(y, ShardedActivation) == divided
        assert y.shape == (*TOKENS, WIDE)
        return [y.rows() if divided else y]

    return [x, weight, *([bias] if with_bias else [])], call


def out_without_bias(axis, divided):
    return out_of(axis, divided, with_bias=False)


CASES = [into, out_of, out_without_bias]


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_as_step_by_step(line, monkeypatch, steps, case, divided):
    """Results, gradients, and gradients of these; and the bytes that are sent."""
    found, moved = [], []
    for largest in (0, boundary_products.LARGEST):
        monkeypatch.setattr(boundary_products, "LARGEST", largest)
        given, call = case(line, divided)
        line.transport.traffic.clear()
        ys = call()
        sum((y.sin() * numbers(*y.shape, seed=y.shape[-1])).sum() for y in ys).backward()
        table = line.transport.traffic.table()
        moved.append({key: (cell["sent"], cell["received"]) for key, cell in table.items()})
        of_first = [each.grad for each in given]
        for each in given:
            each.grad = None
        ys = call()
        loss = sum((y.sin() * numbers(*y.shape, seed=y.shape[-1])).sum() for y in ys)
        again = torch.autograd.grad(loss, given, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in again), given)
        found.append([*ys, *of_first, *again, *second])
    assert len(steps) == 2
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, **CLOSE)
    assert moved[0] == moved[1]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("divided", [False, True])
def test_products_that_nobody_takes(line, divided):
    given, call = into(line, divided)
    call()[1].sum().backward()
    found = [each.grad is not None for each in given]
    assert found == [True, False, False, True, False]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_what_was_made_stays(line, case, divided):
    """Whatever goes through the same memory later; and may be changed in place, as by nn.ReLU(inplace=True)."""
    _, call = case(line, divided)
    first = [(y, y.detach().clone()) for y in call()]
    for _ in range(3):
        sum(y.square().sum() for y in case(line, divided)[1]()).backward()
    for y, then in first:
        assert torch.equal(y, then)
    sum(y.relu_().sum() for y, _ in first).backward()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_numbers(line, divided, dtype):
    """As the products and their sum in float64, rounded."""
    x, weight = (numbers(*shape, seed=line.rank + 1).to(dtype) for shape in ((*TOKENS, 4), (WIDE, 4)))
    y = leaving(x, weight, None, 0, line, divided)
    whole = line.comm.allreduce((x.double() @ weight.double().t()).numpy())
    tolerance = 4 * torch.finfo(dtype).eps * abs(whole).max()
    torch.testing.assert_close(torch.tensor(whole), y[...].double(), rtol=0, atol=float(tolerance))


@pytest.mark.ranks(2)
def test_what_others_follow(line, steps):
    """Step by step: what torch casts, or follows."""
    x, weight = numbers(*TOKENS, WIDE).float(), numbers(3, WIDE).float()
    expected = entering(x, [(weight, None)], line)[0]
    assert not steps
    with torch.autocast("cpu"):
        assert entering(x, [(weight, None)], line)[0].dtype == torch.bfloat16
    with torch.autograd.forward_ad.dual_level():
        torch.testing.assert_close(entering(x, [(weight, None)], line)[0], expected)
    assert steps == ["linears"] * 2
