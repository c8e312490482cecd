"""Divided linear layers multiply by oneDNN where that is faster: as F.linear, to rounding of float32."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hpctrain as ht
from hpctrain import gemm
from hpctrain.convert import linear as module
from hpctrain.convert.linear import linear, linears

CLOSE = {"rtol": 1e-5, "atol": 1e-5}

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")


@pytest.fixture(autouse=True)
def small_ones_too(monkeypatch):
    """On every processor."""
    monkeypatch.setattr(gemm, "is_faster", lambda: True)
    monkeypatch.setattr(gemm, "PAYS", 1)
    monkeypatch.setattr(module, "_PAYS", 1)


@pytest.fixture
def calls(monkeypatch):
    """Of the products that are oneDNN's where that is faster."""
    found = []
    mm, addmm = gemm.mm, gemm.addmm
    monkeypatch.setattr(gemm, "mm", lambda *given, **options: found.append("mm") or mm(*given, **options))
    monkeypatch.setattr(gemm, "addmm", lambda *given, **options: found.append("addmm") or addmm(*given, **options))
    return found


def given(dtype=torch.float32, bias=True, seed=0):
    torch.manual_seed(seed)
    shapes = (2, 3, 5), (4, 5), (4,)
    x, weight, offset = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)
    return x, weight, offset if bias else None


@pytest.mark.parametrize("bias", [True, False])
def test_result_and_gradients(calls, bias):
    x, weight, offset = given(bias=bias)
    seed = torch.randn(2, 3, 4)
    found = []
    for function in (F.linear, linear):
        y = function(x, weight, offset)
        found.append([y, *torch.autograd.grad(y, [each for each in (x, weight, offset) if each is not None], seed)])
    for a, b in zip(*found):
        torch.testing.assert_close(b, a, **CLOSE)
    assert len(calls) == 3


def test_gradients_of_gradients():
    x, weight, offset = given()
    found = []
    for function in (F.linear, linear):
        y = function(x, weight, offset).square()
        (first,) = torch.autograd.grad(y.sum(), weight, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), [x, weight, offset]))
    for a, b in zip(*found):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4)


def several():
    torch.manual_seed(1)
    shapes = (2, 3, 5), (4, 5), (4,), (6, 5), (2, 5), (2,)
    x, *others = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    return x, [(others[0], others[1]), (others[2], None), (others[3], others[4])]


def one_by_one(x, layers):
    return [F.linear(x, *layer) for layer in layers]


@pytest.mark.parametrize("used", [(0, 1, 2), (0, 2), (1,)])
def test_several_products_of_one_input(used):
    x, layers = several()
    every = [x, *(each for layer in layers for each in layer if each is not None)]
    found = []
    for function in (one_by_one, linears):
        outputs = function(x, layers)
        loss = sum((outputs[each].sin() * (each + 1)).sum() for each in used)
        first = torch.autograd.grad(loss, every, create_graph=True, allow_unused=True)
        again = sum(g.square().sum() for g in first if g is not None)
        found.append([*outputs, *first, *torch.autograd.grad(again, every, allow_unused=True)])
    for a, b in zip(*found, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)


def test_complex_numbers():
    """Whose gradients are of conjugates."""
    x, layers = several()
    x, *pair = (
        each.detach().to(torch.complex128).mul_(1 + 2j).requires_grad_() for each in (x, layers[0][0], layers[1][0])
    )
    found = []
    for function in (one_by_one, linears):
        loss = sum(y.abs().square().sum() for y in function(x, [(weight, None) for weight in pair]))
        found.append(torch.autograd.grad(loss, (x, *pair)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a)


def test_several_products_are_one_node():
    x, layers = several()
    nodes = {y.grad_fn.next_functions[0][0] for y in linears(x, layers)}
    assert len(nodes) == 1


def test_a_frozen_weight_among_several():
    x, layers = several()
    layers[0][0].requires_grad_(False)
    sum(y.sum() for y in linears(x, layers)).backward()
    assert layers[0][0].grad is None
    assert all(each.grad is not None for each in (x, layers[0][1], layers[1][0], *layers[2]))


def test_result_changed_in_place():
    """As nn.ReLU(inplace=True) does, and hooks on it."""
    x, weight, offset = given()
    found = []
    for function in (F.linear, linear):
        y, seen = function(x, weight, offset), []
        y.narrow(-1, 1, 2).add_(offset[:2])
        y.relu_()
        y.register_hook(seen.append)
        found.append([y, *torch.autograd.grad(y.square().sum(), (x, weight, offset)), *seen])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a, **CLOSE)


def test_only_what_is_asked_for(calls):
    x, weight, _ = given(bias=False)
    linear(x.detach(), weight).sum().backward()
    assert x.grad is None
    assert weight.grad is not None
    assert len(calls) == 2


def test_a_weight_that_changed_since():
    x, weight, offset = given()
    y = linear(x, weight, offset)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def in_autocast(x, weight, product):
    with torch.autocast("cpu"):
        return product(x, weight)


def in_vmap(x, weight, product):
    return torch.func.vmap(lambda each: product(each, weight))(x)


def in_jvp(x, weight, product):
    return torch.func.jvp(lambda x: product(x, weight), (x,), (x,))[1]


def forward_mode(x, weight, product):
    with torch.autograd.forward_ad.dual_level():
        return torch.autograd.forward_ad.unpack_dual(product(torch.autograd.forward_ad.make_dual(x, x), weight)).tangent


def of_two(x, weight):
    return linears(x, [(weight, None)] * 2)[1]


@pytest.mark.parametrize("product", [linear, of_two])
@pytest.mark.parametrize("function", [in_autocast, in_vmap, in_jvp, forward_mode])
def test_what_others_follow(calls, function, product):
    x, weight, _ = given(bias=False)
    with torch.no_grad():
        torch.testing.assert_close(function(x, weight, product), function(x, weight, F.linear))
    assert not calls


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: linear(x.double(), w.double()),
        lambda x, w: linear(x[0, 0], w),
        lambda x, w: linear(x.to("meta"), w.to("meta")),
    ],
)
def test_where_it_is_not_for(calls, function):
    with torch.no_grad():
        function(*given(bias=False)[:2])
    assert not calls


def test_small_products(calls, monkeypatch):
    monkeypatch.setattr(module, "_PAYS", 2 * 3 * 5 * 4 + 1)
    linear(*given())
    assert not calls


class Model(nn.Module):
    """A pair, attention and a lone layer."""

    def __init__(self):
        super().__init__()
        self.pair = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
        self.attention = nn.MultiheadAttention(8, 4, batch_first=True)
        self.alone = nn.Linear(8, 3)

    def forward(self, x):
        x = x + self.pair(x)
        return self.alone(x + self.attention(x, x, x)[0])


@pytest.mark.mpi
@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("options", [{}, {"shard_activations": True}, {"zero": 3}], ids=str)
def test_models(world, calls, options):
    torch.manual_seed(0)
    serial, x = Model(), torch.randn(2, 6, 8)
    data = world.size if "zero" in options else 1
    grid = ht.Grid(data=data, tensor=world.size // data)
    model = ht.parallelize(copy.deepcopy(serial), grid, **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (serial, model)]
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        outputs = [m(x) for m in (serial, model)]
        torch.testing.assert_close(outputs[1], outputs[0], **CLOSE)
        for y in outputs:
            y.square().mean().backward()
        if data == 1:
            check_close_gradients(model, serial, grid)
        for optimizer in optimizers:
            optimizer.step()
    gathered = ht.gather_state_dict(model)
    if grid.rank == 0:
        torch.testing.assert_close(gathered, dict(serial.state_dict()), **CLOSE)
    assert calls


def check_close_gradients(model, serial, grid):
    gathered = ht.gather_gradients(model)
    if grid.rank == 0:
        for name, parameter in serial.named_parameters():
            torch.testing.assert_close(gathered[name], parameter.grad, **CLOSE)
