"""Replicas whose losses depend on different weights, and backwards that add to what is summed already."""

import copy

import pytest
import torch
from parallelize_checks import numbers
from torch import nn

import hpctrain as ht

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 4)]

GRIDS = {2: [{"data": 2}], 4: [{"data": 4}, {"data": 2, "tensor": 2}]}


class Choice(nn.Module):
    """Every batch goes one of two ways."""

    def __init__(self):
        super().__init__()
        self.first, self.ways = nn.Linear(4, 6), nn.ModuleList(nn.Linear(6, 5) for _ in range(2))

    def forward(self, x, way):
        return self.ways[way](self.first(x)).tanh()


def loss_of(model, seed, way):
    return model(numbers(3, 4, seed=seed), way).square().sum()


def choice():
    torch.manual_seed(1)
    return Choice().double()


def scaled_and_clipped(model, optimizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(optimizer)
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1)


CLIPS = {
    "torch": lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "scaler": scaled_and_clipped,
    "ours": lambda model, optimizer: ht.clip_grad_norm_(model, 0.1),
}


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("clip", CLIPS)
def test_weights_of_some_replicas(world, zero, clip):
    """The norm is of all, or refused on all ranks: torch has looked which weights have gradients before the mean."""
    for sizes in GRIDS[world.size]:
        grid = ht.Grid(**sizes)
        serial = choice()
        model = ht.parallelize(copy.deepcopy(serial), grid, zero=zero)
        theirs, ours = (torch.optim.SGD(m.parameters(), 0.1) for m in (serial, model))
        replicas = grid.data.size
        (sum(loss_of(serial, n, n % 2) for n in range(replicas)) / replicas).backward()
        loss_of(model, grid.data.rank, grid.data.rank % 2).backward()
        expected = nn.utils.clip_grad_norm_(serial.parameters(), 0.1)
        if zero or clip == "ours":
            torch.testing.assert_close(CLIPS[clip](model, ours), expected, rtol=1e-12, atol=0)
        else:
            with pytest.raises(ValueError, match="alone depend on 'ways.0.weight', 'ways.0.bias', 'ways.1.w.* and 1"):
                CLIPS[clip](model, ours)
            ht.clip_grad_norm_(model, 0.1)
        for optimizer in (theirs, ours):
            optimizer.step()
        gathered = ht.gather_state_dict(model)
        if grid.rank == 0:
            torch.testing.assert_close(gathered, dict(serial.state_dict()), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("zero", [None, 0, 1])
def test_a_backward_after_the_sum(world, zero):
    """What it reaches for the first time is summed; what is a sum already would count once for each rank. The mean over
    replicas of what is a mean already is that mean."""
    for sizes in GRIDS[world.size]:
        grid = ht.Grid(**sizes)
        serial, ranks = choice(), grid.data.size
        model = ht.parallelize(copy.deepcopy(serial), grid, zero=zero)

        def complete(model=model):
            ht.sync_gradients(model) if zero is None else ht.clip_grad_norm_(model, 1e9)

        def compare(names, serial=serial, model=model):
            for name, p in model.named_parameters():
                if zero in (None, 0) and any(each in name for each in names):
                    whole = dict(serial.named_parameters())[name].grad
                    torch.testing.assert_close(p.grad.as_subclass(torch.Tensor), whole[p.shard.slices])

        head, other = (lambda m: m.ways[0](numbers(2, 6)).square().sum(), lambda m: m.ways[1](numbers(2, 6)).sum())
        divisor = 1 if zero is None else ranks
        for loss in (head, other):  # of weights that the first has not
            (loss(serial) * ranks / divisor).backward()
            loss(model).backward()
            complete()
        compare(["ways.0", "ways.1"])
        (head(serial) * ranks / divisor).backward()
        head(model).backward()
        if zero is not None:
            complete()
            compare(["ways"])
        else:
            with pytest.raises(ValueError) as refused:
                complete()
            assert "added to the gradients of 'ways.0.weight', 'ways.0.bias' after they were su" in str(refused.value)
            assert len(set(world.allgather(str(refused.value)))) == 1
        for m in (serial, model):
            m.zero_grad(set_to_none=False)
        (head(serial) * ranks / divisor).backward()
        head(model).backward()
        complete()
        compare(["ways"])


def test_a_backward_after_the_sum_of_layers(world):
    grid = ht.Grid(data=world.size)
    layer = ht.layers.Linear(grid, 2, 3, to="inner", key=ht.RngKey(1))
    inputs = torch.ones(1, 2), ht.layers.Tokens.of(grid, sequences=1, length=1)
    layer(*inputs).sum().backward()
    ht.sync_gradients(layer, grid)
    layer(*inputs).sum().backward()
    with pytest.raises(ValueError, match="added to the gradients of 'weight', 'bias' after they were summed over"):
        ht.sync_gradients(layer, grid)
    layer.zero_grad(set_to_none=False)
    layer(*inputs).sum().backward()
    ht.sync_gradients(layer, grid)
    assert torch.equal(layer.bias.grad.as_subclass(torch.Tensor), torch.full((3,), float(world.size)))
