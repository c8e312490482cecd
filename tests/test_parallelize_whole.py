"""Weights that nobody knows how to divide stay whole by themselves, with the whole gradient; the rest is divided."""

import copy
import logging

import pytest
import torch
from parallelize_checks import CLOSE, compare, numbers, tensor_grids
from test_parallelize_refusals import on_every_rank
from torch import nn

import hpctrain as ht
from hpctrain.shard import split

pytestmark = pytest.mark.mpi


class RMS(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)
        self.register_buffer("eps", torch.tensor(1e-6))

    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight


class Scaled(nn.Embedding):
    def forward(self, ids):
        return 3 * super().forward(ids + 1)


class Standardised(nn.Conv1d):
    """Reads the weight rather than calling its parent's forward."""

    def forward(self, x):
        weight = (self.weight - self.weight.mean()) / self.weight.std()
        return nn.functional.conv1d(x, weight, self.bias, groups=self.groups)


class Twice(nn.Conv1d):
    """Does both, in groups."""

    def forward(self, x):
        return super().forward(x) + nn.functional.conv1d(x, 2 * self.weight, self.bias, groups=self.groups)


class Gained(Standardised):
    """Has a weight more."""

    def __init__(self):
        super().__init__(6, 6, 1)
        self.gain = nn.Parameter(torch.rand(6))

    def forward(self, x):
        return super().forward(x) * self.gain.view(-1, 1)


class Head(nn.Module):
    """Its own parameter is the bias of its linear layer, as in BERT."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.rand(11))
        self.decoder = nn.Linear(6, 11)
        self.decoder.bias = self.bias

    def forward(self, x):
        return self.decoder(x) + self.bias.sum()


class Vision(nn.Module):
    """With weights of its own beside its layers, at every level."""

    def __init__(self):
        super().__init__()
        self.token, self.position = nn.Parameter(torch.rand(1, 1, 6)), nn.Parameter(torch.rand(5, 6))
        self.words, self.filter = Scaled(8, 6), Gained()
        self.grouped = Twice(6, 6, 1, groups=2)
        self.norm, self.lstm = RMS(6), nn.LSTM(6, 6, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(6, 13), nn.GELU(), nn.Linear(13, 6))
        self.gamma = nn.Parameter(torch.rand(6))
        self.turned = nn.ConvTranspose1d(6, 6, 1)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.head, self.scale = Head(), nn.Parameter(torch.tensor(0.3))

    def forward(self, ids):
        x = torch.cat([self.token.expand(len(ids), -1, -1), self.words(ids)], 1) + self.position
        x = x + self.gamma * self.mlp(self.norm(x))
        x = self.grouped(self.filter(x.mT)).mT + self.lstm(self.normed(x))[0] + self.turned(x.mT).mT
        return self.head(x) * self.scale.exp()


IDS = torch.arange(8).view(2, 4) % 7


@pytest.mark.ranks(1, 2, 3, 4)
def test_gradients(world):
    for grid in tensor_grids(world):
        model = compare(Vision, grid, [IDS])
        whole = [name for name, parameter in model.named_parameters() if parameter.shard.replicated]
        assert whole == ["token", "position", "gamma", "scale", "filter.gain", "norm.weight", "normed.bias"]


@pytest.mark.ranks(2, 4)
def test_replicas(world):
    """Weights that stay whole, on a data axis beside the tensor axis: trained as by one rank."""
    grid = ht.Grid(data=2, tensor=world.size // 2)
    torch.manual_seed(3)
    serial = Vision().double()
    model = ht.parallelize(copy.deepcopy(serial), grid)
    ours, theirs = (torch.optim.SGD(m.parameters(), 0.01) for m in (model, serial))
    mine = split(2, 2, grid.data.rank)
    for _ in range(2):
        for trained, optimizer, ids in ((serial, theirs, IDS), (model, ours, IDS[mine])):
            optimizer.zero_grad()
            trained(ids).square().sum().backward()
            if trained is model:
                ht.sync_gradients(model)
            optimizer.step()
    gathered = ht.gather_state_dict(model)
    if grid.rank == 0:
        torch.testing.assert_close(gathered, dict(serial.state_dict()), **CLOSE)


def test_line(world, caplog):
    """One line says what stays whole; nothing does where nothing stays."""
    torch.manual_seed(3)
    grid = ht.Grid(tensor=world.size)
    with caplog.at_level(logging.WARNING, "hpctrain"):
        ht.parallelize(nn.Linear(3, 3), grid)
        assert not caplog.records
        ht.parallelize(Vision(), grid)
    text = (
        "parallelize: 7.2 % of the weights stay whole on every rank: position, token, gamma, filter.gain, norm.weight,"
        " normed.bias and 1 more"
    )
    assert [record.getMessage() for record in caplog.records] == [text] * (world.rank == 0 and world.size > 1)


class Centre(nn.Module):
    """Running statistics of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(3))
        self.register_buffer("calls", torch.zeros(()).long())

    def forward(self, x):
        self.calls += 1
        if self.training:
            self.centre.lerp_(x.mean(0), 0.1)
        return x - self.centre


@pytest.mark.ranks(2)
def test_statistics_of_a_replica(world):
    def make():
        return nn.Sequential(nn.Linear(3, 3), Centre())

    grid = ht.Grid(data=2)
    model, x = ht.parallelize(_seeded(make), grid), torch.full((4, 3), 1.0 + world.rank)
    model.eval()(x)
    with pytest.raises(ValueError) as refused:
        model.train()(x)
    text = "the forward of 1 (Centre) changed its buffer 'centre', from the batch of one of 2 replicas; use data=1"
    assert str(refused.value).startswith(text)
    assert len(set(world.allgather(str(refused.value)))) == 1
    ht.parallelize(_seeded(make), grid, replicate=["1"])(x)
    compare(make, ht.Grid(tensor=2), [numbers(4, 3)])


def test_no_shapes_yet(world):
    text = r"divide 0 \(LazyLinear\): its weights have no shapes yet; call the model once before parallelize\."
    on_every_rank(world, lambda: nn.Sequential(nn.LazyLinear(2)), text)


class Hard(nn.Linear):
    def reset_parameters(self):
        nn.init.ones_(self.weight)


@pytest.mark.parametrize("make", [lambda: RMS(3), lambda: Hard(3, 2)])
def test_initial_weights_that_nobody_knows(world, make):
    def on_meta():
        with torch.device("meta"):
            model = nn.Sequential(make())
        return model

    on_every_rank(world, on_meta, r"0 \((RMS|Hard)\): (0\.weight is on|what its buffer 'eps' on) the meta device")


def _seeded(make):
    torch.manual_seed(3)
    return make()
