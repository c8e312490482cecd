"""Measured costs of layers: bytes by hand, times of layers that take a known time."""

import time

import pytest
import torch

from hpctrain import models
from hpctrain.models.gpt2 import GPT2Shape
from hpctrain.models.llama import LlamaShape
from hpctrain.models.partition import layers_per_stage, profile_blocks
from hpctrain.pipeline import LayerCosts, partition
from hpctrain.pipeline.profile import profile

SPEC = models.get("gpt2")
SHAPE = GPT2Shape(layers=5, width=16, heads=2, context=8, vocabulary=40)


def slow(forward, backward):
    """An identity of these seconds."""

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            time.sleep(forward)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            time.sleep(backward)
            return grad

    return Slow.apply


def test_times():
    """The first layer's input needs no gradient; the second takes four times as long."""
    weight = torch.ones(3, requires_grad=True)
    of_input, of_weight = slow(0.002, 0.004), slow(0.001, 0.007)
    dear = slow(0.008, 0.016), slow(0.004, 0.028)
    layers = [lambda x: of_input(x) * of_weight(weight), lambda x: dear[0](x) * dear[1](weight)]
    costs = profile(layers, lambda: torch.ones(3), repeats=3)
    expected = LayerCosts([0.003, 0.012], [0, 0.016], [0.007, 0.028])
    for name in ("forward", "input_gradient", "weight_gradient"):
        for measured, slept in zip(getattr(costs, name), getattr(expected, name)):  # loose: cores may be busy
            assert 0.5 * slept <= measured <= 2 * slept + 0.01
    assert weight.grad is None


def test_gradients_are_put_back():
    linear = torch.nn.Linear(3, 3)
    before = torch.ones(3, 3)
    linear.weight.grad = before
    profile([linear, torch.relu], lambda: torch.ones(2, 3), repeats=1)
    assert linear.weight.grad is before
    assert torch.equal(before, torch.ones(3, 3))
    assert linear.bias.grad is None


def test_bytes():
    """x (10, 4) → linear → (10, 6) → gelu → linear → (10, 5), in float64; dropout keeps a mask, relu its result."""
    inner, outer = torch.nn.Linear(4, 6).double(), torch.nn.Linear(6, 5).double()
    layers = [inner, lambda x: outer(torch.nn.functional.gelu(x)), lambda x: torch.relu(x).exp()]
    costs = profile(layers, lambda: torch.ones(10, 4, dtype=torch.float64), repeats=1)
    assert costs.message == [480, 400, 400]
    assert costs.weights == [8 * (24 + 6), 8 * (30 + 5), 0]
    # its input; its input and what gelu gives; what relu gives (what exp gives is its output)
    assert costs.activation == [320, 960, 400]


def test_what_has_no_gradient_costs_none():
    costs = profile([lambda x: x + 1], lambda: torch.ones(2), repeats=1)
    assert (costs.input_gradient, costs.weight_gradient, costs.weights, costs.activation) == ([0], [0], [0], [0])


@pytest.mark.mpi
def test_gpt2(world):
    """Every rank measures by itself here."""
    for layers in (1, 2, 5):
        shape = GPT2Shape(**{**vars(SHAPE), "layers": layers})
        costs = profile_blocks(SPEC, shape, sequences=3, dtype=torch.float64, repeats=2)
        block, table = 12 * 16 * 16 + 13 * 16, 40 * 16
        weights = [block] * layers
        weights[0] += table + 8 * 16
        weights[-1] += 2 * 16 + (table if layers > 1 else 0)  # tied: one table where both are on one stage
        assert costs.weights == [8 * count for count in weights]
        assert costs.message[:-1] == [8 * 3 * 8 * 16] * (layers - 1)
        assert min(costs.forward) > 0
        assert all(i + w > 0 for i, w in zip(costs.input_gradient, costs.weight_gradient))
        if layers == 5:
            assert min(costs.input_gradient[1:]) > 0
            assert len(set(costs.forward[1:4])) == len(set(costs.activation[1:4])) == 1
            # the loss keeps a softmax of all tokens
            assert costs.activation[-1] - costs.activation[1] >= 8 * 24 * 40


@pytest.mark.mpi
@pytest.mark.ranks(1)
def test_llama(world):
    """Bytes of its blocks: 2 + 1 + 1 heads of 4 features and their way back, 3 matrices of 20, and norms."""
    shape = LlamaShape(5, 16, heads=2, context=8, vocabulary=40, kv_heads=1, ffn=20, head_width=4, qk_norm=True)
    costs = profile_blocks(models.get("llama"), shape, sequences=3, dtype=torch.float64, repeats=1)
    block, table = 16 * (16 + 8 + 3 * 20) + 2 * 16 + 2 * 4, 40 * 16
    assert costs.weights == [8 * count for count in [block + table, block, block, block, block + 16 + table]]
    assert all(i + w > 0 for i, w in zip(costs.input_gradient, costs.weight_gradient))


@pytest.mark.mpi
@pytest.mark.parametrize("method", ["even", "dp", "lp", "rl", [1, 4]])
def test_all_ranks_decide_alike(world, method):
    counts = layers_per_stage(world, SPEC, SHAPE, method, 2, ranks=2, microbatches=4, seed=world.rank)
    assert set(map(tuple, world.allgather(counts))) == {tuple(counts)}
    assert sum(counts) == 5
    assert len(counts) == 2
    if method in ("even", [1, 4]):
        assert counts == partition(method, LayerCosts([1.0] * 5), 2, 4)


@pytest.mark.mpi
def test_all_ranks_raise(world):
    for method, options, match in (
        ("x", {}, "partition='x': use one of even"),
        ([5], {}, "whose sum is 5, as"),
        ("dp", {"memory": 10.0}, "the least that would do is"),
        ("even", {"memory": 10.0}, "needs .* bytes on a rank"),
    ):
        with pytest.raises(ValueError, match=match):
            layers_per_stage(world, SPEC, SHAPE, method, 2, ranks=2, microbatches=4, **options)
