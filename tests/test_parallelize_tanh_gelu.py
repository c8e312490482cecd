"""GELU in its tanh form, as torch's and Hugging Face's own modules compute it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN

import hpctrain as ht
from hpctrain.convert import tanh_gelu
from hpctrain.convert.tanh_gelu import FusedTanhGELU

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2)]

TAKEN = {
    "torch": lambda: nn.GELU(approximate="tanh"),
    "gelu_new": lambda: ACT2FN["gelu_new"],
    "gelu_pytorch_tanh": lambda: ACT2FN["gelu_pytorch_tanh"],
}
LEFT = {"exact": nn.GELU, "gelu_fast": lambda: ACT2FN["gelu_fast"], "heir": lambda: Doubled(approximate="tanh")}
CLOSE = {"rtol": 1e-13, "atol": 1e-13}


class Doubled(nn.GELU):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.fixture
def fused(monkeypatch):
    """How often ours was called."""
    found, fill = [], tanh_gelu.fill
    monkeypatch.setattr(tanh_gelu, "fill", lambda *given: found.append(given) or fill(*given))
    return found


def parallelized(make):
    return ht.parallelize(nn.Sequential(make()), ht.Grid(tensor=2), check_steps=0)[0]


def derivatives(function, x):
    """The value, the gradient, and that of the gradient."""
    y = function(x)
    (first,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
    (alone,) = torch.autograd.grad(function(x).sin().sum(), x)
    return y, first, alone, *torch.autograd.grad(first.square().sum(), x)


@pytest.mark.parametrize("kind", TAKEN)
def test_of_others(world, kind, fused):
    x = (4 * torch.randn(7, 5, dtype=torch.float64)).requires_grad_()
    module = parallelized(TAKEN[kind])
    expected = derivatives(lambda x: F.gelu(x, approximate="tanh"), x)
    for got, wanted in zip(derivatives(module, x), expected, strict=True):
        torch.testing.assert_close(got, wanted, **CLOSE)
    assert isinstance(module, FusedTanhGELU)
    assert len(fused) == 4  # two forwards, and each backward of which nobody asks for a derivative


@pytest.mark.parametrize("kind", LEFT)
def test_others(world, kind):
    assert not isinstance(parallelized(LEFT[kind]), FusedTanhGELU)


def test_what_it_is_not_for(world, fused):
    """Goes to the module's own."""
    module, x = parallelized(TAKEN["torch"]), torch.randn(4, 6)
    own = nn.GELU(approximate="tanh")
    assert torch.equal(module(x.bfloat16()), own(x.bfloat16()))
    assert module(x.t()).stride() == own(x.t()).stride()
    with torch.autocast("cpu"):
        assert torch.equal(module(x), own(x))
    assert torch.equal(torch.vmap(module)(x), own(x))
    with torch.autograd.forward_ad.dual_level():
        assert torch.equal(module(x), own(x))
    assert not fused
    assert torch.equal(module(input=x), module(x))
    assert len(fused) == 2
