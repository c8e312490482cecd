"""Deep copies of layers, such as averages of weights."""

import copy

import pytest
import torch
from layer_checks import KEY
from torch.optim.swa_utils import AveragedModel
from training_checks import by_messages

from hpctrain import Grid
from hpctrain.data_parallel import DataParallel, Zero3
from hpctrain.layers import Embedding, Linear, Tokens

pytestmark = pytest.mark.mpi


@pytest.mark.ranks(1, 2, 4)
def test_a_deep_copy(world):
    """Has the slices too, and in a loop of one's own its gradients are those of this rank alone."""
    grid = Grid(data=world.size)
    layers = torch.nn.ModuleList([Linear(grid, 8, 6, to="inner", key=KEY), Embedding(grid, 7, 4, key=KEY)])
    layers.tied = layers[0].weight
    copied = copy.deepcopy(copy.deepcopy(layers))
    assert copied.tied is copied[0].weight is not layers.tied
    for ours, theirs in zip(copied.parameters(), layers.parameters(), strict=True):
        assert ours.shard == theirs.shard
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    copied[0](torch.ones(2, 8), Tokens.of(grid, 1, 2)).sum().backward()
    assert layers.tied.grad is None
    if world.size > 1:
        with pytest.raises(ValueError, match="sync_gradients"):
            torch.optim.SGD(copied.parameters(), 0.1).step()
    replicas = DataParallel(copied.parameters(), grid)
    replicas.zero_grad()


@pytest.mark.ranks(2)
def test_a_deep_copy_of_frozen_weights(world):
    """They may be trained later, and then their gradients are marked as those of the others."""
    grid = Grid(data=2)
    copied = copy.deepcopy(Linear(grid, 8, 6, to="inner", key=KEY).requires_grad_(False))
    assert not any(p.requires_grad for p in copied.parameters())
    copied.requires_grad_(True)
    copied(torch.ones(2, 8), Tokens.of(grid, 1, 2)).sum().backward()
    with pytest.raises(ValueError, match="sync_gradients"):
        torch.optim.SGD(copied.parameters(), 0.1).step()


@pytest.mark.ranks(2)
def test_a_deep_copy_of_weights_that_are_spread_over_the_replicas(world):
    """By messages, where they have no memory between their uses."""
    grid = Grid(data=2)
    by_messages(grid)
    model = torch.nn.ModuleDict({"h": torch.nn.ModuleList([Linear(grid, 8, 6, to="inner", key=KEY)])})
    expected = [p.detach().clone() for p in model.parameters()]
    Zero3(model, grid, torch.optim.SGD(model.parameters(), 0.1))
    copied = AveragedModel(model).module
    for ours, theirs, original in zip(copied.parameters(), expected, model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        assert ours.shard == original.shard
        assert not original.untyped_storage().nbytes()


@pytest.mark.ranks(1)
def test_a_deep_copy_of_a_weight_that_others_freed(world):
    layer = Linear(Grid(), 8, 6, to="inner", key=KEY)
    layer.weight.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="weight of Linear was freed, and not by ZeRO-3"):
        copy.deepcopy(layer)
