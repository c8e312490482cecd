"""Batch norms left whole by `replicate`, over replicas: statistics of the global batch, or an error."""

import copy

import pytest
import torch
from parallelize_checks import check_gradients, numbers
from torch import nn

import hpctrain as ht
from hpctrain.shard import split

pytestmark = pytest.mark.mpi

GRIDS = {1: {}, 2: {"data": 2}, 4: {"data": 2, "tensor": 2}}


class Renamed(nn.BatchNorm1d):
    """With torch's forward."""


class WithActivation(nn.BatchNorm2d):
    """As timm's BatchNormAct2d."""

    def forward(self, x):
        return super().forward(x).relu()


def train(model, batches, rows, sync):
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for x in batches:
        optimizer.zero_grad()
        model(x[rows]).square().sum().backward()
        sync(model)
        optimizer.step()


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, Renamed])
@pytest.mark.parametrize("affine", [True, False])
def test_three_steps(world, kind, affine):
    grid = ht.Grid(**GRIDS[world.size])
    torch.manual_seed(1)
    serial = nn.Sequential(nn.Linear(3, 5), kind(5, affine=affine), nn.Tanh(), nn.Linear(5, 2)).double()
    model = ht.parallelize(copy.deepcopy(serial), grid, replicate=[kind.__name__])
    batches = [numbers(7, 3, seed=seed) for seed in range(3)]
    train(serial, batches, slice(None), lambda model: None)
    train(model, batches, split(7, grid.data.size, grid.data.rank), ht.sync_gradients)
    gathered = ht.gather_state_dict(model)
    if grid.rank == 0:
        torch.testing.assert_close(gathered, dict(serial.state_dict()), rtol=1e-10, atol=1e-12)
    for name, buffer in serial.named_buffers():
        torch.testing.assert_close(dict(model.named_buffers())[name], buffer, rtol=1e-12, atol=1e-12)


def test_gradient_penalty(world):
    """Backward through backward, of statistics over replicas: the gradients of 0.5 |dL/dx|² by weights and x."""
    grid = ht.Grid(**GRIDS[world.size])
    torch.manual_seed(1)
    serial = nn.Sequential(nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3), nn.Tanh(), nn.BatchNorm1d(3, affine=False)).double()
    model = ht.parallelize(copy.deepcopy(serial), grid)
    x, rows = numbers(4, 2, 5), split(4, grid.data.size, grid.data.rank)
    found = []
    for m, mine in ((serial, slice(None)), (model, rows)):
        held = x[mine].clone().requires_grad_()
        (first,) = torch.autograd.grad((m(held) ** 3).sum(), held, create_graph=True)
        (first.square().sum() / 2).backward()
        found.append(held.grad)
    torch.testing.assert_close(found[1], found[0][rows], rtol=1e-11, atol=1e-11)
    ht.sync_gradients(model)
    check_gradients(model, serial, grid)


def refusal(world, module, **how):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 2, 1), module)
    with pytest.raises(ValueError) as refused:
        ht.parallelize(model, ht.Grid(data=world.size), **how)
    assert len(set(world.allgather(str(refused.value)))) == 1
    return str(refused.value)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("how", [{}, {"replicate": ["1"]}])
def test_statistics_of_one_replica(world, how):
    """A forward of its own computes them: the error leads to what does work, and not to `replicate`."""
    told = refusal(world, WithActivation(2), **how)
    assert told == (
        f"parallelize cannot divide 1 (WithActivation): its statistics would be those of one of {world.size} replicas; "
        "use torch's own nn.BatchNorm1d, 2d or 3d, whose statistics are then those of all replicas, with what follows "
        "it in modules of their own, or data=1."
    )
    told = refusal(world, nn.InstanceNorm2d(2, track_running_stats=True), **how)
    assert told.endswith("replicas; set track_running_stats=False, or data=1.")


def test_one_replica(world):
    """On tensor ranks the whole batch is there, whatever the forward does."""
    torch.manual_seed(0)
    grid = ht.Grid(tensor=world.size)
    serial = nn.Sequential(WithActivation(2), nn.InstanceNorm2d(2, affine=True, track_running_stats=True)).double()
    model = ht.parallelize(copy.deepcopy(serial), grid, replicate=["*"])
    x = numbers(3, 2, 4, 4)
    torch.testing.assert_close(model(x), serial(x), rtol=1e-12, atol=1e-12)
