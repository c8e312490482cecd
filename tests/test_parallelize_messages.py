"""What divided layers need not send or copy, which changes no number."""

import pytest
import torch
from parallelize_checks import numbers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

import hpctrain as ht
from hpctrain.convert.sharding import local

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 4)]


def calls(grid, work):
    """How many of each collective."""
    grid.transport.traffic.clear()
    work()
    return {name: each["calls"] for (_, name), each in grid.transport.traffic.table().items()}


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.BatchNorm1d])
@pytest.mark.parametrize(("frozen", "messages"), [("", 1), ("bias", 2), ("weight bias", 1)])
def test_weight_and_bias_of_a_norm_are_gathered_together(world, kind, frozen, messages):
    """Where both or neither have gradients, which are this rank's parts without a message."""
    grid = ht.Grid(tensor=world.size)
    norm = kind(6).double()
    for name in frozen.split():
        norm.get_parameter(name).requires_grad_(False)
    norm, x = ht.parallelize(norm, grid, check_steps=0), numbers(3, 6).requires_grad_()
    y = []
    assert calls(grid, lambda: y.append(norm(x))) == {"all_gather": messages}
    assert calls(grid, y[0].sum().backward) == {}
    assert [p.grad is not None for p in norm.parameters()] == [name not in frozen for name in ("weight", "bias")]


class Copies(TorchDispatchMode):
    """Shapes of what torch copies by itself."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.copy_.default, torch.ops.aten.clone.default):
            self.found.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


def test_gradients_come_in_the_order_of_the_weight(world):
    """Else autograd copies each of a Conv1D's, which is most of GPT-2."""
    torch.manual_seed(0)
    model = nn.Sequential(Conv1D(8, 4), nn.Tanh(), Conv1D(4, 8), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    model = ht.parallelize(model, ht.Grid(tensor=world.size), check_steps=0)
    y = model(numbers(6, 4).requires_grad_()).sum()
    with Copies() as copies:
        y.backward()
    with local():
        assert not {tuple(p.shape) for p in model.parameters() if p.dim() == 2} & {*copies.found}
