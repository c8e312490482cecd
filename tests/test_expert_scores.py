"""Weights of experts from their scores, against the same in steps that torch differentiates."""

import pytest
import torch

from hpctrain.layers.experts.scores import SCORES, Chosen, weigh

EXPERTS = torch.tensor([[4, 0], [1, 2], [0, 3]])


@pytest.mark.parametrize("shift", [0.0, -600.0], ids=["", "scores of almost nothing"])
@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("kind", SCORES)
def test_gradients(kind, normalized, scale, shift):
    """Of the weights alone, of the scores alone, and of both."""
    generator = torch.Generator().manual_seed(0)
    logits, other = (torch.randn(3, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    logits, seed = logits + shift, torch.randn(3, 2, generator=generator, dtype=torch.float64)
    weight, theirs = torch.eye(5, dtype=torch.float64), logits.clone().requires_grad_()
    ours = logits.clone().requires_grad_()
    scores = theirs.softmax(1) if kind == "softmax" else theirs.sigmoid()
    chosen = scores.gather(1, EXPERTS)
    expected = scale * (chosen / (chosen.sum(1, keepdim=True) + 1e-20) if normalized else chosen)
    by = Chosen(logits, SCORES[kind].forward(logits), EXPERTS, kind, normalized, scale, True)
    weights, _, passed, _ = weigh(ours, logits, None, weight, by)
    torch.testing.assert_close(weights, expected, rtol=1e-14, atol=0)
    assert torch.equal(passed, scores)
    for loss in (
        lambda weights, scores: (weights * seed).sum(),
        lambda weights, scores: (scores * other).sum(),
        lambda weights, scores: (weights * seed).sum() + (scores * other).sum(),
    ):
        (found,) = torch.autograd.grad(loss(weights, passed), ours, retain_graph=True)
        (gradient,) = torch.autograd.grad(loss(expected, scores), theirs, retain_graph=True)
        torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-14 * float(gradient.abs().max()))


@pytest.mark.parametrize("jitter", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradients_of_tokens_and_of_the_router_s_weight(dtype, jitter):
    """By the weights, the logits and the tokens that go on to the experts, of which each may count nothing."""
    generator = torch.Generator().manual_seed(0)
    x, seed = (torch.randn(3, 4, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    weight = torch.randn(5, 4, generator=generator, dtype=torch.float64).to(dtype)
    wide_dtype = torch.float64 if dtype is torch.float64 else torch.float32
    factors = torch.rand(3, 4, generator=generator, dtype=wide_dtype) if jitter else None

    def logits_of(x, weight):
        wide = x.to(wide_dtype) if factors is None else x.to(wide_dtype) * factors
        return wide, wide @ weight.to(wide_dtype).t()

    def ours(x, weight, has_losses):
        wide, logits = (each.detach() for each in logits_of(x, weight))
        by = Chosen(logits, SCORES["softmax"].forward(logits), EXPERTS, "softmax", True, 1.0, has_losses)
        weights, x, _, logits = weigh(x, wide, factors, weight, by)
        return weights, logits, x

    def expected(x, weight, has_losses):
        logits = logits_of(x, weight)[1]
        return logits.gather(1, EXPERTS).softmax(1), logits, x

    for used in ((0,), (1,), (2,), (0, 2), (1, 2), (0, 1, 2)):
        gradients = []
        for side in (ours, expected):
            inputs = [each.clone().requires_grad_() for each in (x, weight)]
            weights, logits, rows = side(*inputs, has_losses=1 in used)
            losses = (weights.square().sum(), logits.square().sum(), (rows * seed).sum())
            sum(losses[place] for place in used).backward()
            gradients.append([torch.zeros_like(each) if each.grad is None else each.grad for each in inputs])
        tolerance = 1e-13 if dtype is torch.float64 else 4 * torch.finfo(dtype).eps
        for found, right in zip(*gradients):
            torch.testing.assert_close(found, right, rtol=tolerance, atol=tolerance * float(right.abs().max()))
