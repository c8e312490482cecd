"""What a parallelized model hands out whole, and goes on with in parts: its gradient is the whole one, or refused."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from parallelize_checks import CLOSE, boxes, compare, numbers
from test_parallelize_activations import SHARDED, Curious
from test_parallelize_transformers import IDS, gpt2

import hpctrain as ht

pytestmark = pytest.mark.mpi


def twice(self, h):
    return {"first": h, "last": self.second(h), "again": [h]}


def changed_before(self, h):
    h = h.clone()
    h += self.second(h.clone())
    return {"first": h, "last": self.second(h.clone()), "again": [h]}


def changed_after(self, h):
    return {"first": h, "last": self.second(h.clone()), "again": [h], "changed": True}


def beside_others(model, x):
    out = model(x)
    h, y = out["first"], out["last"]
    assert h is out["again"][0]
    if "changed" in out:  # so that nothing of the model comes from it any more
        h.mul_(torch.linspace(1, 2, 8))
    loss = (y.square() + h.cos()).sum()
    first = torch.autograd.grad(loss, [h, y], retain_graph=True, materialize_grads=True)
    handle = h.register_hook(lambda gradient: gradient.cumsum(0))
    hooked = torch.autograd.grad(loss, [h, model.second.down.weight], retain_graph=True)
    handle.remove()
    again = torch.autograd.grad(loss, h, create_graph=True)
    return h, y, first[0], first[1], hooked[0], again[0]


@pytest.mark.parametrize("how", [twice, changed_before, changed_after])
def test_what_a_model_returns_beside_others(world, how):
    for grid in boxes(world):
        compare(lambda: Curious(how), grid, [numbers(2, 5, 8)], beside_others, **SHARDED)


def weights_of_attention(model, ids):
    """Of which the later ones come from the first."""
    out = model(ids, labels=ids, output_attentions=True, output_hidden_states=True)
    asked = [*out.attentions, out.hidden_states[1]]
    found = torch.autograd.grad(out.loss + out.attentions[0].sin().sum(), asked, create_graph=True)
    for x in out.attentions:
        x.register_hook(lambda gradient: gradient.cumsum(1))
    return out.loss, *asked, *found


@pytest.mark.parametrize("options", [{}, SHARDED])
def test_attention_weights(world, options):
    """Of ranks without heads too."""
    make = lambda: gpt2(attn_implementation="eager", attn_pdrop=0.0, n_layer=2)  # noqa: E731
    for grid in boxes(world):
        compare(make, grid, [IDS], weights_of_attention, **options)


@pytest.mark.ranks(2)
def test_tensors_like_any_other(world):
    model = ht.parallelize(Curious(twice).double(), ht.Grid(tensor=2), **SHARDED)
    model.second.up.weight.requires_grad_(False)
    h = model(numbers(2, 5, 8))["first"]
    assert isinstance(h, torch.Tensor)
    for made in (h[0], h @ model.second.up.weight.T, F.linear(h, model.first.up.weight)):
        assert type(made) is torch.Tensor
    saved = io.BytesIO()
    torch.save(h, saved)
    saved.seek(0)
    torch.testing.assert_close(torch.load(saved, weights_only=True), h, **CLOSE)
    h.backward(torch.ones_like(h))
    assert model.norm.weight.grad is not None


@pytest.mark.ranks(2)
def test_gradients_that_would_be_of_a_part(world):
    model = ht.parallelize(Curious(twice).double(), ht.Grid(tensor=2), **SHARDED)
    out = copy.copy(model(numbers(2, 5, 8)))
    with pytest.raises(ValueError, match=f"line .* of .*{__name__}.py: retain_grad, for a tensor of which every rank"):
        out["first"].retain_grad()
    for inputs in (out["first"], [out["first"]], [model.norm.weight, out["first"]]):
        with pytest.raises(ValueError, match=r"inputs=\[...\] of backward, for a tensor .*; torch.autograd.grad gives"):
            out["last"].sum().backward(inputs=inputs)
        with pytest.raises(ValueError, match=r"inputs=\[...\] of backward"):
            out["last"].backward(torch.ones_like(out["last"]), inputs=inputs)
    within = lambda self, h: self.second(h).sum().backward(inputs=[h])  # noqa: E731
    with pytest.raises(ValueError, match=r"inputs=\[...\] of backward"):
        ht.parallelize(Curious(within).double(), ht.Grid(tensor=2), **SHARDED)(numbers(2, 5, 8))
