"""What divided layers need not send or copy, which changes no number."""

import pytest
import torch
from parallelize_checks import numbers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

import hpctrain as ht
from hpctrain.convert.sharding import local

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 4)]


def calls(grid, work):
    """How many of each collective."""
    grid.transport.traffic.clear()
    work()
    return {name: each["calls"] for (_, name), each in grid.transport.traffic.table().items()}


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.BatchNorm1d, nn.RMSNorm])
def test_a_norm_of_whole_activations_sends_nothing(world, kind):
    grid = ht.Grid(tensor=world.size)
    norm, x = ht.parallelize(kind(6).double(), grid, check_steps=0), numbers(3, 6).requires_grad_()
    y = []
    assert calls(grid, lambda: y.append(norm(x))) == {}
    assert calls(grid, y[0].sum().backward) == {}


class Normed(nn.Module):
    """A pair, whose output a norm goes on with."""

    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))
        self.norm = nn.LayerNorm(6)

    def forward(self, x):
        return self.norm(self.mlp(x))


@pytest.mark.parametrize(("frozen", "sums"), [("", 1), ("bias", 1), ("weight bias", 0)])
def test_gradients_of_a_norm_by_rows_are_summed_together(world, frozen, sums):
    """Of its weight and bias; nothing is sent before."""
    torch.manual_seed(0)
    grid, model = ht.Grid(tensor=world.size), Normed().double()
    for name in frozen.split():
        model.norm.get_parameter(name).requires_grad_(False)
    model, x = ht.parallelize(model, grid, check_steps=0, shard_activations=True), numbers(6, 6).requires_grad_()
    inside, y = model.mlp(x), []
    assert calls(grid, lambda: y.append(model.norm(inside))) == {}
    needed = [p for p in model.norm.parameters() if p.requires_grad]
    found = calls(grid, lambda: needed and torch.autograd.grad(y[0].rows().sum(), needed))
    assert found == ({"all_reduce": sums} if sums else {})


class Copies(TorchDispatchMode):
    """Shapes of what torch copies by itself."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.copy_.default, torch.ops.aten.clone.default):
            self.found.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


def test_gradients_come_in_the_order_of_the_weight(world):
    """Else autograd copies each of a Conv1D's, which is most of GPT-2."""
    torch.manual_seed(0)
    model = nn.Sequential(Conv1D(8, 4), nn.Tanh(), Conv1D(4, 8), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    model = ht.parallelize(model, ht.Grid(tensor=world.size), check_steps=0)
    y = model(numbers(6, 4).requires_grad_()).sum()
    with Copies() as copies:
        y.backward()
    with local():
        assert not {tuple(p.shape) for p in model.parameters() if p.dim() == 2} & {*copies.found}
