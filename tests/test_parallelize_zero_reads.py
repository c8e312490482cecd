"""zero=3 where weights travel by messages: they have memory while their layer computes, and are read elsewhere too."""

import copy

import pytest
import torch
import torch.nn.functional as F
from parallelize_checks import numbers
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import hpctrain as ht

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 4)]

CLOSE = {"rtol": 1e-11, "atol": 1e-12}


class Readers(nn.Module):
    """Reads weights of layers before these compute and after it, and one that every rank has whole."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)) for _ in range(3))
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x):
        h = F.linear(x, self.blocks[2][0].weight).tanh()
        for block in self.blocks:
            h = h + block(h) * self.gain
        h = F.linear(h, self.blocks[0][0].weight, self.blocks[1][1].bias)
        with torch.no_grad():
            scale = self.blocks[1][0].weight.norm() + self.blocks[1][1].weight.sum()
        return h * scale


class Detached(Readers):
    """Keeps what it detached until its layer has computed."""

    def forward(self, x):
        for block in self.blocks:
            kept = [p.detach() for p in block.parameters()]
            x = F.layer_norm(F.linear(block(x), *kept[:2]), (6,), *kept[2:])
        return x * self.gain


class Compared(Readers):
    """Weights of other layers beside rows of an activation."""

    def __init__(self):
        super().__init__()
        self.scales = nn.ModuleList(Scale() for _ in range(2))

    def forward(self, x):
        for block, scale, other in zip(self.blocks, self.scales, reversed(self.scales)):
            x = block(x) + scale(x) * other.weight
        return x


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x):
        return self.down(self.up(x).relu())


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.weight = MLP(), nn.Parameter(torch.linspace(1, 2, 6))

    def forward(self, x):
        return self.inner(x) * self.weight


def both(world, kind=Readers, **options):
    """One rank, and replicas that take no memory of each other's."""
    grid = ht.Grid(data=2, tensor=world.size // 2)
    grid.data.one_node = False
    torch.manual_seed(0)
    serial = kind().double()
    return grid, serial, ht.parallelize(copy.deepcopy(serial), grid, zero=3, **options)


def loss_of(model, x):
    return sum(p.square().sum() for p in model.parameters()) + model(x).square().sum(1).mean()


def same(gathered, serial, grid):
    if grid.rank == 0:
        torch.testing.assert_close(gathered, dict(serial.state_dict()), **CLOSE)


def test_reads_and_averages(world):
    """Penalties before the forward, a norm between clipping and the step, and averages of weights after it."""
    grid, serial, model = both(world)
    x, norms, copies = numbers(4, 6), [], []
    for m, rows in ((serial, x), (model, x.chunk(2)[grid.data.rank])):
        optimizer = torch.optim.SGD(m.parameters(), 0.01, momentum=0.9)
        averaged = AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.5)), AveragedModel(m)
        norms.append([])
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(m, rows).backward()
            norms[-1].append(nn.utils.clip_grad_norm_(m.parameters(), 1.0).item())
            norms[-1].append(sum(p.norm() for p in m.parameters()).item())
            optimizer.step()
            for each in averaged:
                each.update_parameters(m)
        copies.append([*(each.module for each in averaged), copy.deepcopy(m)])
    assert norms[1] == pytest.approx(norms[0], rel=1e-11)
    same(ht.gather_state_dict(model), serial, grid)
    for theirs, mine in zip(*copies):
        same(ht.gather_state_dict(mine, grid), theirs, grid)
        torch.testing.assert_close(mine(x), theirs(x), **CLOSE)


@pytest.mark.parametrize(("kind", "shards"), [(Detached, False), (Compared, False), (Compared, True)])
def test_forwards(world, kind, shards):
    grid, serial, model = both(world, kind, shard_activations=shards)
    x = numbers(4, 6)
    for m, rows in ((serial, x), (model, x.chunk(2)[grid.data.rank])):
        optimizer = torch.optim.SGD(m.parameters(), 0.01)
        for _ in range(2):
            optimizer.zero_grad()
            m(rows).square().sum(1).mean().backward()
            optimizer.step()
    same(ht.gather_state_dict(model), serial, grid)


def test_weights_of_several_layers(world):
    """Beside copies and parts of others, whose layers compute before backward reads them."""
    grid, serial, model = both(world)
    differences, penalties = [], []
    for m in (serial, model):
        linear, norm = m.blocks[0]
        taken = [linear.bias.data * m.gain, m.gain.data - linear.weight, m.gain.data - m.blocks[1][1].weight]
        differences.append([x.detach().sum().item() for x in taken])
        penalties.append((linear.weight * m.gain).square().sum() + (m.gain * norm.weight).sum())
        with torch.no_grad():
            m(numbers(4, 6))
        penalties[-1].backward()
        torch.optim.SGD(m.parameters(), 0.01).step()
    torch.testing.assert_close(penalties[1], penalties[0], **CLOSE)
    assert differences[1] == pytest.approx(differences[0], rel=1e-11)
    same(ht.gather_state_dict(model), serial, grid)


def test_parameters_that_are_made_of_a_weight(world):
    """Of their own memory."""
    _, serial, model = both(world)
    made = nn.Parameter(model.gain)
    model(numbers(4, 6))
    assert isinstance(made, nn.Parameter)
    torch.testing.assert_close(made.detach(), serial.gain.detach(), rtol=0, atol=0)


def test_what_is_taken_of_a_weight_is_a_copy(world):
    """Which stays as it was, and is not written to, as that would be lost."""
    grid, serial, model = both(world)
    before = [p.detach().clone() for p in model.parameters()]
    taken = [p.detach() for p in model.parameters()] + [p.data for p in model.parameters()]
    views = [p.view(-1) for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss_of(model, numbers(4, 6)).backward()
    optimizer.step()
    for given, then in zip(taken, 2 * before):
        assert torch.equal(given, then)
    whole = [p.reshape(-1) for p in serial.parameters()]
    torch.testing.assert_close([view.detach() for view in views], whole, rtol=0, atol=0)
    for weight in (model.gain, model.blocks[0][0].weight):
        assert repr(weight)
        with pytest.raises(ValueError, match="mul_ writes to a view of a weight .* would be lost"):
            weight.data.mul_(2)
    model.double()
    ht.gather_state_dict(model)
    with torch.no_grad():
        model.gain.mul_(2)
    with pytest.raises(ValueError, match="changed by other code than an optimizer's step"):
        ht.gather_state_dict(model)
