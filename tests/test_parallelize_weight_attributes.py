"""What hangs on a divided weight: its part, hooks, attributes, gradients, copies."""

import copy

import pytest
import torch
from parallelize_checks import CLOSE, part_of, tensor_grids
from read_weights import IDS, Tied, check_weights, made, train
from torch import nn

import hpctrain as ht

pytestmark = pytest.mark.mpi


def test_the_part(world):
    """What torch's optimizers and the library itself work on; and the whole shape for everybody else."""
    model = ht.parallelize(made(Tied), ht.Grid(tensor=world.size))
    weight = model.first.weight
    rows = part_of(weight).shape[0]
    assert world.allreduce(rows) == 6
    assert weight.shape == (6, 5)
    assert weight.numel() == 30
    assert len(weight) == weight.size(0) == 6
    assert weight.nbytes == weight.data.nbytes == 6 * 5 * 8
    assert weight.data.shape == torch.zeros_like(weight).shape == (6, 5)
    assert torch.zeros_like(weight).as_subclass(torch.Tensor).shape == (rows, 5)
    model(IDS).sum().backward()
    assert weight.grad.shape == (6, 5)
    assert weight.grad.as_subclass(torch.Tensor).shape == (rows, 5)
    again = torch.autograd.grad(model(IDS).sum(), [weight])[0]
    torch.testing.assert_close(again, weight.grad, **CLOSE)
    columns = ht.parallelize(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3)), ht.Grid(tensor=world.size))
    weight = columns[2].weight
    assert weight.stride() == weight.data.stride() == (8, 1)
    assert weight.stride(0) == 8


def test_hooks_and_attributes(world):
    """Hooks see the whole gradient, made before the line or after; attributes stay."""
    grid = tensor_grids(world)[-1]
    seen = {"serial": [], "model": []}

    def watch(model, key):
        def hook(gradient):
            seen[key].append((tuple(gradient.shape), gradient.norm().item()))
            return gradient / gradient.norm()

        model.first.weight.no_weight_decay, model.table.weight.lr_scale = True, 0.5
        removed = model.second.weight.register_hook(lambda gradient: gradient * 0)
        model.attention.in_proj_weight.register_hook(hook)
        model.first.weight.register_hook(hook)
        return removed, hook

    serial, model = made(Tied), made(Tied)
    for m, key in ((serial, "serial"), (model, "model")):
        removed, hook = watch(m, key)
        if m is model:
            ht.parallelize(model, grid)
        removed.remove()
        m.table.weight.register_hook(hook)
    assert model.first.weight.no_weight_decay
    assert model.table.weight.lr_scale == 0.5
    losses = [train(m, torch.optim.SGD(m.parameters(), 0.002)) for m in (serial, model)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-11)
    assert len(seen["serial"]) == 9
    for expected, got in zip(seen["serial"], seen["model"], strict=True):
        assert got[0] == expected[0]
        assert got[1] == pytest.approx(expected[1], rel=1e-10)
    check_weights(model, serial, grid)


def test_attributes_of_weights_on_meta(world):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 3))
    model[0].weight.lr_scale = 0.5
    torch.manual_seed(0)
    assert ht.parallelize(model, ht.Grid(tensor=world.size))[0].weight.lr_scale == 0.5


def test_hooks_refused(world):
    """Of replicas, each would see a part of the sum; after accumulation there is no whole gradient to be seen."""

    def refused(register, grid, text):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
        register(model[0].weight)
        with pytest.raises(ValueError, match=text) as error:
            ht.parallelize(model, grid)
        assert len(set(world.allgather(str(error.value)))) == 1

    if world.size > 1:
        replicas = ht.Grid(data=world.size)
        one = r"0 \(Linear\): the weight '0\.weight' has a hook on its gradient, .* change \.grad after ht\.sync"
        refused(lambda p: p.register_hook(lambda g: g), replicas, one)
        later = r"'0\.weight' has a hook after its gradient is accumulated, .*register it after parallelize if"
        for grid in (replicas, ht.Grid(tensor=world.size)):
            refused(lambda p: p.register_post_accumulate_grad_hook(lambda p: None), grid, later)


def test_hooks_after_accumulation_see_the_part(world):
    """As for an optimizer within backward."""
    grid = tensor_grids(world)[-1]
    serial, model = made(Tied), ht.parallelize(made(Tied), grid)
    for m in (serial, model):
        for p in m.parameters():
            optimizer = torch.optim.SGD([p], 0.02)
            p.register_post_accumulate_grad_hook(lambda p, o=optimizer: o.step() or o.zero_grad())
        for _ in range(2):
            m(IDS).square().mean().backward()
    check_weights(model, serial, grid)


def test_a_gradient_from_before(world):
    grid = tensor_grids(world)[-1]
    serial, model = made(Tied), made(Tied)
    for m in (serial, model):
        m(IDS).square().mean().backward()
    ht.parallelize(model, grid)
    for m in (serial, model):
        m(IDS).square().mean().backward()
        torch.optim.SGD(m.parameters(), 0.002).step()
    check_weights(model, serial, grid)


def test_kinds_of_parameters_that_have_no_parts(world):
    class Quantised(nn.Parameter):
        pass

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3))
    model[0].weight = Quantised(model[0].weight.detach())
    with pytest.raises(ValueError, match=r"0 \(Linear\): the weight '0\.weight' is a Quantised, not a torch\.nn\.Par"):
        ht.parallelize(model, ht.Grid(tensor=world.size))


def test_copies(world):
    """copy.deepcopy, and averaged models made of it."""
    grid = tensor_grids(world)[-1]
    serial, model = made(Tied), ht.parallelize(made(Tied), grid, replicate=["filter"])
    copies = [torch.optim.swa_utils.AveragedModel(m, avg_fn=lambda a, b, n: a * 0.5 + b * 0.5) for m in (serial, model)]
    for m, average in zip((serial, model), copies):
        optimizer = torch.optim.SGD(m.parameters(), 0.002)
        for _ in range(3):
            train(m, optimizer, 1)
            average.update_parameters(m)
    torch.testing.assert_close(copies[1](IDS), copies[0](IDS), **CLOSE)
    check_weights(copies[1].module, copies[0].module, grid)
    twin = copy.deepcopy(model)
    assert twin.first.weight is not model.first.weight
    assert twin.first.weight.shard == model.first.weight.shard
    assert train(twin, torch.optim.SGD(twin.parameters(), 0.002)) == pytest.approx(
        train(serial, torch.optim.SGD(serial.parameters(), 0.002)), rel=1e-11
    )
