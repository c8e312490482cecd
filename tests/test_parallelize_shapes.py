"""Shapes that scripts ask parts for, and weights so narrow that one rank has all of them: every rank does the same."""

import copy

import pytest
import torch
from parallelize_checks import numbers
from torch import nn

import hpctrain as ht

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 4)]

CLOSE = {"rtol": 1e-12, "atol": 1e-13}


def narrow():
    """Weights of one output, a table of one row, and wider ones, of which some rank may have one row."""
    torch.manual_seed(1)
    return nn.ModuleDict(
        {
            "one": nn.Linear(6, 1), "conv": nn.Conv2d(3, 1, 2), "table": nn.Embedding(1, 6), "wide": nn.Linear(6, 8),
            "odd": nn.Linear(6, 3),
        }
    ).double()  # fmt: skip


def run(model):
    x = numbers(2, 6)
    loss = model["one"](x).square().sum() + model["conv"](numbers(2, 3, 4, 4)).square().sum()
    return loss + model["odd"](x).square().sum() + (model["wide"](x + model["table"](torch.tensor([0, 0]))) ** 2).sum()


def of(p, seed=3):
    """Numbers of the whole shape, the same on all ranks."""
    return numbers(*p.shape, seed=seed) if p.dim() else numbers(1, seed=seed)[0]


@torch.no_grad()
def exponential_average(p):
    p.lerp_(of(p), 0.5)


@torch.no_grad()
def copied(p):
    p.copy_(of(p))


@torch.no_grad()
def stepped(p):
    p.addcmul_(of(p), of(p, 4), value=0.1)


@torch.no_grad()
def towards(p):
    p.sub_((p - of(p)) * 0.1)


@torch.no_grad()
def towards_it(p):
    p += (of(p) - p).clamp(-0.1, 0.1)


@torch.no_grad()
def data_towards(p):
    p.data.add_(of(p), alpha=0.5)


@torch.no_grad()
def data_changed(p):
    p.data = p.data + of(p)


@torch.no_grad()
def noise_in_gradients(p):
    p.grad = p.grad + of(p)
    p.sub_(p.grad, alpha=0.1)


@torch.no_grad()
def noise_on_gradients(p):
    p.grad.add_(of(p))
    p.sub_(p.grad, alpha=0.1)


@torch.no_grad()
def noise_of_the_shape(p):
    p.sub_(p.grad + torch.randn(p.grad.shape, dtype=p.dtype), alpha=0.1)


@torch.no_grad()
def noise_of_the_size(p):
    p.data.add_(torch.randn(p.data.size(), dtype=p.dtype) / p.data.size(0) / len(p.data))


@torch.no_grad()
def mean_by_the_number(p):
    p.sub_(p.grad.sum() / p.grad.numel())


@torch.no_grad()
def state_of_the_shape(p):
    state = torch.zeros(p.grad.shape, dtype=p.dtype)
    state.mul_(0.9).add_(p.grad, alpha=0.1)
    p.add_(state, alpha=-0.1)


@torch.no_grad()
def masked(p):
    p.masked_fill_(of(p) > 0, 0.5)


@torch.no_grad()
def decayed(p):
    p.mul_(torch.tensor([0.9], dtype=p.dtype))
    p.data.mul_(torch.tensor([0.9], dtype=p.dtype))
    p.copy_(p * torch.tensor([0.9], dtype=p.dtype))


@torch.no_grad()
def centred(p):
    if p.dim() > 1:
        p.sub_(p.mean(0, keepdim=True))
        p.data.sub_(p.mean(1, keepdim=True))
        p.data.add_(of(p[0], 5)).add_(of(p[:1], 6))


@torch.no_grad()
def triangular(p):
    if p.dim() == 2:
        p.data.fill_diagonal_(0)
        p.data.tril_(1)
        p.data.copy_(torch.triu(p.data, -2) + p.data.roll(1, 0))


@torch.no_grad()
def rows_set(p):
    p.data.index_fill_(0, torch.tensor([len(p) - 1]), 0.25)


@torch.no_grad()
def drawn_around(p):
    p.data.copy_(torch.normal(p.data, 0.01))


@torch.no_grad()
def stacked(p):
    p.mul_(torch.stack([p.grad, p.data]).norm())


@torch.no_grad()
def into_the_weight(p):
    torch.add(of(p), of(p, 4), out=p)
    torch.mul(p.grad, of(p, 5), out=p.grad)
    torch.add(p.data, p.grad, out=p.data)
    torch.sub(p.data, of(p, 6), out=p)
    torch.mul(p, of(p, 7), out=p.data)
    if p.dim() == 2:
        torch.triu(p.data, out=p.data)
        torch.tril(p.data, 1, out=p)


@torch.no_grad()
def pruned(p):
    p.data[(p.data.abs() < 0.2).nonzero(as_tuple=True)] = 0.0
    p.data[torch.where(p.data > 0.3)] = 0.3
    p.mul_(1 + len((p.grad.abs() < 1.0).nonzero()))
    p.add_(torch.cat([p.data, p]).sum() + p.grad.abs().frexp()[1].sum())


@torch.no_grad()
def gradient_replaced(p):
    p.grad.data = of(p)
    p.sub_(p.grad, alpha=0.1)


CASES = [
    exponential_average, copied, stepped, towards, towards_it, data_towards, data_changed, noise_in_gradients,
    noise_on_gradients, noise_of_the_shape, noise_of_the_size, mean_by_the_number, state_of_the_shape, masked, decayed,
    centred, triangular, rows_set, drawn_around, stacked, into_the_weight, pruned, gradient_replaced,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_done_to_weights(world, case):
    """As on one rank, after which the generators are where one rank's is."""
    serial = narrow()
    model = ht.parallelize(copy.deepcopy(serial), ht.Grid(tensor=world.size))
    drawn = []
    for each in (serial, model):
        run(each).backward()
        torch.manual_seed(5)
        for p in each.parameters():
            case(p)
        drawn.append(torch.rand(1))
    assert drawn[0] == drawn[1]
    gathered = ht.gather_state_dict(model)
    if world.rank == 0:
        torch.testing.assert_close(gathered, dict(serial.state_dict()), **CLOSE)


def test_shapes_of_views_are_refused(world):
    model = ht.parallelize(nn.Linear(6, 8), ht.Grid(tensor=world.size))
    model(torch.ones(1, 6)).sum().backward()
    for part in (model.weight.data, model.weight.grad):
        assert part.shape == (8, 6)
        assert part.numel() == 48
        assert part.view(-1).dim() == 1
        with pytest.raises(ValueError, match=r"line \d+ of .*test_parallelize_shapes.py: shape of 'weight' would be"):
            torch.randn(part.view(-1).shape)


@torch.no_grad()
def followed(average, model):
    for mean, p in zip(average.parameters(), model.parameters()):
        mean.lerp_(p, 0.1)
        mean.data.mul_(0.9).add_(p.data, alpha=0.1)
        mean.add_((mean - p) * 0.1)


def test_averages_that_are_whole(world):
    """A model that was copied before the line follows the weights on every rank, and is as far from them."""
    serial = narrow()
    model, found = ht.parallelize(copy.deepcopy(serial), ht.Grid(tensor=world.size)), []
    for each in (serial, model):
        average = copy.deepcopy(serial)
        for p in average.parameters():
            p.data.add_(of(p))
        followed(average, each)
        with torch.no_grad():
            far = [(mean - p).norm() for mean, p in zip(average.parameters(), each.parameters())]
        found.append([far, [p.detach() for p in average.parameters()]])
    torch.testing.assert_close(found[1], found[0], **CLOSE)
