"""RMS norms of several classes, which one function computes in float32, and their own forward otherwise."""

import copy

import pytest
import torch
from torch import nn

import hpctrain as ht
from hpctrain.convert.rms_norm import FusedRMSNorm

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2)]


class OfLlama(nn.Module):
    def __init__(self, width, eps=1e-2):
        super().__init__()
        self.weight, self.slope, self.variance_epsilon = nn.Parameter(torch.randn(width)), 0.5, eps

    def forward(self, hidden_states):
        wide = hidden_states.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(hidden_states.dtype)


class OfGemma(OfLlama):
    def forward(self, x):
        return super().forward(x) + super().forward(x) / self.weight


class LessMean(OfLlama):
    def forward(self, x):
        return super().forward(x - x.mean(-1, keepdim=True))


class WithoutEps(OfLlama):
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


class InTraining(OfLlama):
    def forward(self, x):
        return super().forward(x) * (2.0 if self.training else 1.0)


def of_torch(width):
    return nn.RMSNorm(width, eps=1e-2)


TAKEN = {OfLlama: True, of_torch: True, OfGemma: False, LessMean: False, WithoutEps: False, InTraining: False}


def both(make, dtype, **options):
    torch.manual_seed(0)
    serial = nn.Sequential(make(6), nn.Linear(6, 6)).to(dtype)
    model = copy.deepcopy(serial)
    return serial, ht.parallelize(model, ht.Grid(tensor=2), **options)


def check(model, serial, close):
    gradients = ht.gather_gradients(model)
    if model.hpctrain_grid.rank == 0:
        for name, p in serial.named_parameters():
            torch.testing.assert_close(gradients[name], p.grad, **close)


CLOSE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
}


@pytest.mark.parametrize("dtype", [*CLOSE, torch.bfloat16])
@pytest.mark.parametrize("make", TAKEN)
def test_norms(world, make, dtype):
    """Forward hooks see what they would, and an eps that is changed is heeded. In float64 and bfloat16
    the norm's own forward, with its float32 inside, is what runs: bit by bit."""
    x = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(1)).to(dtype)
    for shards in (False, True):
        models, found = both(make, dtype, shard_activations=shards), []
        assert isinstance(models[1][0], FusedRMSNorm) == TAKEN[make]
        for model in models:
            seen = []
            model[0].register_forward_hook(lambda module, given, output, seen=seen: seen.append(output.detach() * 1))
            for name in ("variance_epsilon", "eps"):
                if hasattr(model[0], name):
                    setattr(model[0], name, 0.1)
            y = model(each := x.clone().requires_grad_())
            y.square().sum().backward()
            found.append([y.detach(), each.grad, *seen])
        assert dtype == torch.float32 or torch.equal(found[0][2], found[1][2])
        if dtype in CLOSE:
            torch.testing.assert_close(found[1], found[0], **CLOSE[dtype])
            check(*models[::-1], CLOSE[dtype])


@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_of_gradients(world, frozen):
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    models, found = both(of_torch, torch.float32), []
    for model in models:
        model[0].weight.requires_grad_(not frozen)
        each = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(each).pow(3).sum(), each, create_graph=True)
        slope.square().sum().backward()
        found.append([slope.detach(), each.grad])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
    if not frozen:
        check(*models[::-1], {"rtol": 1e-4, "atol": 1e-4})
