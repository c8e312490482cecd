"""Weights and states that replicas share out, as scripts look at them between steps."""

import copy

import pytest
import torch
from parallelize_checks import CLOSE
from test_parallelize_zero import loss_of, network, one_step, weights_agree
from torch import nn

import hpctrain as ht

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2)]


def test_looks_at_the_state_of_the_optimizer(world):
    """They make empty ones of weights, whose states lie with their pieces."""
    grid, serial = ht.Grid(data=2), network()
    model = ht.parallelize(copy.deepcopy(serial), grid, zero=1)
    for m, where in ((serial, None), (model, grid)):
        optimizer = torch.optim.AdamW(m.parameters(), 0.01)
        for step in range(3):
            one_step(m, where, optimizer, step)
            assert all(isinstance(optimizer.state[p], dict) for p in m.parameters())
    weights_agree(model, serial, grid, **CLOSE)


def network_of_two():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8)).double()


@pytest.mark.ranks(4)
def test_the_data_of_a_divided_weight(world):
    """Is the part, of which nobody can take the norm for that of the whole; it is read and not written to."""
    model, serial = ht.parallelize(network_of_two(), ht.Grid(data=2, tensor=2), zero=3), network_of_two()
    p, q = model[0].weight, serial[0].weight
    for data in (p.data, p.detach()):
        assert data.shape == (8, 6)
        torch.testing.assert_close(data.norm(), q.detach().norm(), **CLOSE)
        torch.testing.assert_close((2 * data).mul_(0.5).sum(), q.detach().sum(), **CLOSE)
    mask = torch.arange(48).view(8, 6) % 3 > 0
    chosen = [torch.where(mask, data, torch.zeros_like(w)).norm() for w, data in ((p, p.data), (q, q.detach()))]
    torch.testing.assert_close(*chosen, **CLOSE)
    average = p.data.clone()
    average.mul_(0.5).add_(p.data, alpha=0.5)
    torch.testing.assert_close(average.norm(), q.detach().norm(), **CLOSE)
    writes = (
        lambda: p.data.mul_(0.99), lambda: p.data.view(-1).zero_(), lambda: p.detach().__setitem__(0, 0.0),
        lambda: torch.add(p.data, 1.0, out=p.data), lambda: torch._foreach_zero_([p.data]),
    )  # fmt: skip
    for write in writes:
        with pytest.raises(ValueError, match="writes to a view of a weight that zero=3 of ht.parallelize spreads"):
            write()


def test_norms_of_ranges(world):
    """Of a vector it is right, of which others are those of matrices."""
    grid, serial = ht.Grid(data=2), network()
    model, norms = ht.parallelize(copy.deepcopy(serial), grid, zero=1), []
    for m in (serial, model):
        m.gate.bias.square().sum().backward()
        norms.append(torch.linalg.norm(m.gate.bias.grad, 3))
    torch.testing.assert_close(*norms, **CLOSE)
    p = next(p for p in model.parameters() if p.dim() == 2)
    p.square().sum().backward()
    with pytest.raises(ValueError, match="linalg_norm of the gradient of .* would be that of the part"):
        torch.linalg.norm(p.grad, 2)


class Decayed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = network_of_two()

    def forward(self, x):
        self.layers[0].weight.data.mul_(0.99)
        return self.layers(x)


@pytest.mark.ranks(4)
def test_writes_within_a_forward(world):
    model = ht.parallelize(Decayed(), ht.Grid(data=2, tensor=2), zero=3)
    model(torch.ones(1, 6, dtype=torch.float64)).sum().backward()
    with pytest.raises(ValueError, match="'layers.0.weight' was .*changed by other code than an optimizer's step"):
        torch.optim.SGD(model.parameters(), 0.1).step()


def test_writes_to_the_data_of_whole_weights(world):
    """By every replica, of one memory."""
    grid = ht.Grid(data=2)
    model = ht.parallelize(network(), grid, zero=3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    one_step(model, grid, optimizer, 0)
    assert type(model.gate.bias.data) is torch.Tensor
    loss_of(model, grid, 1).backward()
    model.gate.bias.data.mul_(0.99)
    with pytest.raises(ValueError, match="'gate.bias' was .*changed by other code than an optimizer's step"):
        optimizer.step()
