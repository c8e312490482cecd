"""The first steps of a parallelized model: where ranks of the tensor axis do different things, all of them say so."""

import math
import random

import numpy
import pytest
import torch
import torch.nn.functional as F
from parallelize_checks import numbers
from torch import nn

import hpctrain as ht

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2)]


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))
        self.order, self.draw = "first second", None

    def forward(self, x, scale=None):
        for name in self.order.split():
            x = self.get_submodule(name)(x)
        if self.draw:
            x = x * self.draw()
        return {"y": x if scale is None else x * scale["value"]}


def made(world, **how):
    torch.manual_seed(0)
    return ht.parallelize(Network().double(), ht.Grid(tensor=world.size), **how)


def step(model, x, scale=None, target=0):
    loss = (model(x, scale)["y"] - target).square().sum()
    loss.backward()
    return loss


# What the last rank does differently: (model, whether this is that rank) -> what is to be called, and what is said.
CASES = {
    "batch": (
        lambda model, last: step(model, numbers(2, 4, seed=5 + last)),
        r"calls the model with argument 0 = \(2, 4\) float64, checksum \S+, where rank 0 has argument 0 = \(2, 4\) fl",
    ),
    "shape of the batch": (
        lambda model, last: step(model, numbers(2 + last, 4)),
        r"calls the model with argument 0 = \(3, 4\) float64, .* where rank 0 has argument 0 = \(2, 4\) float64",
    ),
    "one element": (
        lambda model, last: step(model, numbers(2, 4) + last * 1e-3 * torch.eye(2, 4)),
        "calls the model with argument 0 = ",
    ),
    "whole numbers": (
        lambda model, last: model(numbers(2, 4), {"value": torch.tensor([1, 2, 3, 4 + last])}),
        r"calls the model with argument 1.value = \(4,\) int64, checksum ",
    ),
    "targets": (
        lambda model, last: step(model, numbers(2, 4), target=last),
        r"runs backward with the gradient of output y = \(2, 4\) float64, ",
    ),
    "mode": (
        lambda model, last: model.train(not last)(numbers(2, 4)),
        "calls the model with the mode = training=False, gradients=True, where rank 0 has the mode = training=True,",
    ),
    "order": (
        lambda model, last: reorder(model, "second first" if last else "first second"),
        "calls second, where rank 0 calls first",
    ),
    "a module left out": (
        lambda model, last: reorder(model, "first" if last else "first second"),
        "ends the call, where rank 0 calls second",
    ),
    "seed of torch": (
        lambda model, last: draw(model, lambda: torch.manual_seed(last), lambda: torch.rand(())),
        "ends the call with the generator of torch in state ",
    ),
    "seed of Python": (
        lambda model, last: draw(model, lambda: random.seed(int(last)), random.random),
        "ends the call with the generator of random in state ",
    ),
    "seed of numpy": (
        lambda model, last: draw(model, lambda: numpy.random.seed(int(last)), numpy.random.random),
        "ends the call with the generator of numpy in state ",
    ),
    "dropout on some": (
        lambda model, last: draw(model, lambda: None, (lambda: F.dropout(torch.ones(()))) if last else lambda: 1.0),
        "ends the call with the generator of torch in state .*, where rank 0 has the generator of torch unused",
    ),
}


def reorder(model, order):
    model.order = order
    return step(model, numbers(2, 4))


def draw(model, seed, draw):
    seed()
    model.draw = draw
    return step(model, numbers(2, 4))


@pytest.mark.parametrize("case", CASES)
def test_ranks_that_differ(world, case):
    call, text = CASES[case]
    last = int(world.size > 1 and world.rank == world.size - 1)
    for before in (0, 2):  # in the first step, and in the third
        model = made(world)
        for _ in range(before):
            step(model, numbers(2, 4))
        if world.size == 1:
            call(model, last)
            continue
        with pytest.raises(ValueError, match=f"^rank {world.size - 1} of the tensor axis {text}") as refused:
            call(model, last)
        assert "check_steps=0 of ht.parallelize" in str(refused.value)
        assert len(set(world.allgather(str(refused.value)))) == 1
        model.order, model.draw = "first second", None
        step(model.train(), numbers(2, 4))  # and go on, alike


@pytest.mark.parametrize("value", [torch.finfo(torch.float64).min, -math.inf, math.nan])
def test_numbers_that_have_no_sum(world, value):
    """As masks of Hugging Face are made of: alike where they are in the same places, and not in others."""
    model, places = made(world), torch.tensor([True, True, False, True])
    mask = torch.ones(4, dtype=torch.float64).masked_fill(places, value)
    model(numbers(2, 4), {"value": mask})
    if world.size > 1:
        with pytest.raises(ValueError, match=r"calls the model with argument 1\.value = \(4,\) float64, checksum "):
            model(numbers(2, 4), {"value": mask.flip(0) if world.rank else mask})


def test_what_may_differ(world):
    """Generators that the model does not draw from, rounding, and everything after the first steps."""
    model = made(world, check_steps=2)
    last = int(world.size > 1 and world.rank == world.size - 1)
    torch.manual_seed(last)
    random.seed(int(last))
    for _ in range(2):
        step(model, numbers(2, 4) * (1 + last * 1e-15))
    step(model, numbers(2, 4, seed=5 + last), target=last)
    other = made(world, check_steps=0)
    step(other, numbers(2, 4, seed=5 + last))
    torch.manual_seed(0)


def test_replicas_have_batches_of_their_own(world):
    torch.manual_seed(0)
    model = ht.parallelize(Network().double(), ht.Grid(data=world.size))
    step(model, numbers(2 + world.rank, 4))


def test_a_call_that_fails(world):
    """On all ranks: the next one is compared as ever."""
    model = made(world)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied|size mismatch|mat1 and mat2"):
        model(numbers(2, 3))
    assert not nn.modules.module._global_forward_pre_hooks
    assert not nn.modules.module._global_forward_hooks
    step(model, numbers(2, 4))


@pytest.mark.parametrize("steps", [-1, 2.0, None, True])
def test_check_steps(world, steps):
    with pytest.raises(ValueError, match=f"check_steps must be an integer of at least 0, got {steps}"):
        made(world, check_steps=steps)
