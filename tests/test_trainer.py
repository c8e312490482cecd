"""ht.Trainer's two kinds of models: whole ones with a loss, and those that are cut into stages."""

import pytest
import torch
from torch import nn

import hpctrain as ht
from hpctrain.models.gpt2 import GPT2, GPT2Shape

pytestmark = pytest.mark.mpi

X = torch.arange(8, dtype=torch.float64).view(4, 2)


def square(model, x):
    return model(x).square().sum()


def line(grid):
    """y = 2 a + 3 b, without bias."""
    model = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    model.weight.data.copy_(torch.tensor([[2.0, 3.0]]))
    return ht.parallelize(model, grid)


def test_forward_backward_then_update(world):
    """The loss is 3² + 13² + 23² + 33² on each replica; weights change with the update alone."""
    grid = ht.Grid(data=world.size)
    model = line(grid)
    trainer = ht.Trainer(model, grid, torch.optim.SGD(model.parameters(), 0.25), loss=square, max_norm=1.0)
    loss, norm, overflow = trainer.forward_backward([X[:2], X[2:]])
    assert (loss, overflow) == (1796.0 * world.size, False)
    # 2 Σ y a = 2 (0·3 + 2·13 + 4·23 + 6·33) = 632, 2 Σ y b = 2 (3 + 3·13 + 5·23 + 7·33) = 776
    assert norm == pytest.approx((632**2 + 776**2) ** 0.5 * world.size, rel=1e-14)
    assert model.weight.tolist() == [[2.0, 3.0]]
    trainer.update(norm)
    expected = torch.tensor([[2 - 0.25 * 632 * world.size / norm, 3 - 0.25 * 776 * world.size / norm]])
    torch.testing.assert_close(model.weight.detach(), expected.double(), rtol=1e-6, atol=0)


def test_evaluation_of_a_whole_model(world):
    """Over all batches and replicas; none where all are told to stop."""
    grid = ht.Grid(data=world.size)
    model = line(grid)
    trainer = ht.Trainer(model, grid, torch.optim.SGD(model.parameters(), 0.25), loss=square)
    assert trainer.evaluate([[X[:2]], [X[2:3], X[3:]]]) == 1796.0 * world.size
    assert trainer.evaluate([[X]], lambda: True) is None


def test_what_is_missing_is_said(world):
    grid = ht.Grid(data=world.size)
    model = line(grid)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match="Linear is not cut into pipeline stages: give the Trainer loss="):
        ht.Trainer(model, grid, optimizer)
    with pytest.raises(ValueError, match="schedule is for a model that is cut into pipeline stages"):
        ht.Trainer(model, grid, optimizer, 2, loss=square)


@pytest.mark.ranks(2, 4)
def test_a_loss_of_the_whole_model_meets_a_pipeline(world):
    grid = ht.Grid(pipeline=world.size)
    model = GPT2(grid, GPT2Shape(world.size, 4, 1, 4, 8), key=ht.RngKey(0))
    with pytest.raises(ValueError, match=f"pipeline={world.size} and a loss of the whole model: use pipeline=1"):
        ht.Trainer(model, grid, torch.optim.SGD(model.parameters(), 0.1), loss=square)
