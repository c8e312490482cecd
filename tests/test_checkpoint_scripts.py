"""ht.checkpoint.save, load and verify, of a model of one's own."""

import pytest
import torch
from torch import nn

import hpctrain as ht

pytestmark = pytest.mark.mpi


def training(grid, seed):
    torch.manual_seed(seed)
    model = ht.parallelize(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double(), grid)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    return ht.Trainer(model, grid, optimizer, loss=lambda model, x: model(x).square().sum())


def test_saved_and_loaded_on_another_grid(world, tmp_path):
    """Saved by replicas, loaded by shards of a model of another seed: the same weights, and the same next step."""
    root = world.bcast(tmp_path) / "checkpoints"
    batch = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)
    one = training(ht.Grid(data=world.size), seed=1)
    mine = batch / world.size**0.5  # so that the replicas' losses add up to one of the whole batch
    one.step([mine])
    assert ht.checkpoint.load(root, one.model, one.strategy) is None
    assert ht.checkpoint.save(root, 1, one.model, one.strategy, {"epoch": 3}) == root / "step-1"
    other = training(ht.Grid(tensor=world.size), seed=2)
    manifest = ht.checkpoint.load(root, other.model, other.strategy)
    assert (manifest.step, manifest.member("epoch")) == (1, 3)
    saved, loaded = (ht.gather_state_dict(trainer.model) for trainer in (one, other))
    if world.rank == 0:
        torch.testing.assert_close(loaded, saved, rtol=0, atol=0)
        assert ht.checkpoint.verify(root / "step-1").manifest.step == 1
    with pytest.raises(ValueError, match="no checkpoint of step 1: .*exists"):
        ht.checkpoint.save(root, 1, one.model, one.strategy)
