"""ht.parallelize(shard_activations=True): whoever asks for the gradient of an activation gets the whole one."""

import pytest
import torch
from parallelize_checks import boxes, compare, numbers
from test_parallelize_activations import SHARDED, Curious
from torch.utils.checkpoint import checkpoint

import hpctrain as ht

pytestmark = pytest.mark.mpi


def alone(self, h):
    y = self.second(h)
    return y, torch.autograd.grad(y.square().sum() + h.cos().sum(), h, create_graph=True)[0]


def beside_a_weight(self, h):
    y = self.second(h)
    gradients = torch.autograd.grad(y.square().sum(), [self.second.down.weight, h], retain_graph=True)
    others = torch.autograd.grad(y.cos().sum(), [h, self.second.down.weight], create_graph=True)
    return y, *(gradient.sum() for gradient in (*gradients, *others))


def of_another(self, h):
    return self.second(h), *torch.autograd.grad(h.cos(), [h + 1, h], h.sin(), materialize_grads=True, retain_graph=True)


@pytest.mark.parametrize("how", [alone, beside_a_weight, of_another])
def test_asked_for(world, how):
    for grid in boxes(world):
        compare(lambda: Curious(how), grid, [numbers(2, 5, 8)], **SHARDED)


def test_hooks_on_what_a_model_returns(world):
    """They see, and change, what comes by way of the rest of the model as well."""

    def run(model, x):
        h, y = model(x)
        seen = []
        h.register_hook(lambda gradient: seen.append(gradient) or gradient.clamp(-0.1, 0.1).cumsum(0))
        h.register_hook(lambda gradient: seen.append(2 * gradient))
        (h.cos() + y.square()).sum().backward(retain_graph=True)
        return h, y, *(x.clone() for x in seen)

    for grid in boxes(world):
        compare(lambda: Curious(lambda self, h: (h, self.second(h))), grid, [numbers(2, 5, 8)], run, **SHARDED)


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient * ctx.saved_tensors[0]


def test_functions_of_ones_own(world):
    """Are given what is whole."""
    for grid in boxes(world):
        compare(
            lambda: Curious(lambda self, h: self.second(Squared.apply(h[...]))), grid, [numbers(2, 5, 8)], **SHARDED
        )


@pytest.mark.ranks(2)
def test_functions_that_know_of_no_parts(world):
    grid, x = ht.Grid(tensor=2), numbers(2, 5, 8)
    model = ht.parallelize(Curious(lambda self, h: self.second(Squared.apply(h))).double(), grid, **SHARDED)
    with pytest.raises(ValueError, match=f"line .* of .*{__name__}.py: Squared of an activation of which every rank"):
        model(x)
    with torch.no_grad():
        model(x)
    again = lambda self, h: checkpoint(torch.sin, h, use_reentrant=True)  # noqa: E731
    with pytest.raises(ValueError, match=r"\(use_reentrant=True\) cannot give back activations .*; use use_re"):
        ht.parallelize(Curious(again).double(), grid, **SHARDED)(x)
    model = ht.parallelize(Curious(lambda self, h: self.second(self.norm(h))).double(), grid, **SHARDED)
    model.norm.register_full_backward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="line .*: a full backward hook of an activation of which every rank"):
        model(x)
