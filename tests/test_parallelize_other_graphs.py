"""Graphs of torch's that are not one forward with its backward: saved tensors elsewhere, forward mode, torch.func in a
forward, and a graph from before parallelize."""

import pytest
import torch
from parallelize_checks import CLOSE, compare, numbers, tensor_grids
from torch import nn
from torch.autograd import forward_ad

import hpctrain as ht

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.up, self.mix = nn.Embedding(20, 6), nn.Linear(6, 9), nn.Conv1d(9, 6, 3, padding=1)
        self.norm, self.layer = nn.LayerNorm(6), nn.TransformerEncoderLayer(6, 3, 12, dropout=0.0, batch_first=True)

    def forward(self, ids):
        x = self.up(self.table(ids)).relu()
        return self.layer(self.norm(self.mix(x.mT).mT))


@pytest.mark.parametrize("shard_activations", [False, True])
@pytest.mark.parametrize("pin", [False, True])
def test_saved_on_the_host(world, pin, shard_activations):
    """Of weights, a processor's save_on_cpu keeps the parameter itself."""

    def run(model, ids):
        with torch.autograd.graph.save_on_cpu(pin_memory=pin):
            return model(ids)

    ids = torch.arange(12).view(2, 6)
    compare(Block, tensor_grids(world)[0], [ids], run, shard_activations=shard_activations)


class Within(nn.Module):
    """`way` is done to a layer within the forward."""

    def __init__(self, way):
        super().__init__()
        self.way, self.linear, self.table, self.norm = way, nn.Linear(6, 9), nn.Embedding(30, 9), nn.LayerNorm(9)

    def forward(self, x):
        return self.way(self, x)


@pytest.mark.parametrize(
    "way",
    [
        lambda m, x: torch.vmap(m.linear)(x),
        lambda m, x: torch.vmap(m.table)(x.abs().long()),
        lambda m, x: torch.vmap(lambda row: row @ m.linear.weight.T)(x),
        lambda m, x: torch.func.grad(lambda row: m.linear(row).sum())(x),
    ],
)
def test_torch_func_in_a_forward(world, way):
    model = ht.parallelize(Within(way).double(), ht.Grid(tensor=world.size))
    with pytest.raises(ValueError, match=r"goes to other ranks within torch.func, .* use torch.autograd.grad"):
        model(numbers(4, 6))


def test_torch_func_in_a_forward_beside_what_is_divided(world):
    def make():
        return Within(lambda m, x: torch.vmap(m.norm)(m.linear(x)) + m.table.weight.sum())

    compare(make, tensor_grids(world)[0], [numbers(4, 6)])


def test_forward_mode(world):
    """A tangent goes to no other rank; torch.autograd.functional takes two backwards instead."""
    x, tangent = numbers(4, 6), numbers(4, 6, seed=2)
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2)).double()
    expected = torch.autograd.functional.jvp(plain, x, tangent)[1]
    model = ht.parallelize(plain, ht.Grid(tensor=world.size))
    with forward_ad.dual_level():
        with pytest.raises(ValueError, match="within forward-mode differentiation, .* use torch.autograd.grad, or"):
            model(forward_ad.make_dual(x, tangent))
        model(x)  # has no tangent
    torch.testing.assert_close(torch.autograd.functional.jvp(model, x, tangent)[1], expected, **CLOSE)


def test_a_graph_from_before(world):
    """It keeps how gradients are given to a weight, of its shape then."""
    model = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 2)).double()
    before = model(numbers(4, 6))
    ht.parallelize(model, ht.Grid(tensor=world.size))
    model(numbers(4, 6)).sum().backward()
    assert before.requires_grad
    assert [p.grad.shape == p.detach().shape for p in model.parameters()] == [True] * 4
