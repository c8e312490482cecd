"""Weights of experts from their scores, against the same in steps that torch differentiates."""

import pytest
import torch

from hpctrain.layers.experts.scores import SCORES, weigh

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
    ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
    scores = theirs.softmax(1) if kind == "softmax" else theirs.sigmoid()
    chosen = scores.gather(1, EXPERTS)
    expected = scale * (chosen / (chosen.sum(1, keepdim=True) + 1e-20) if normalized else chosen)
    weights, passed = weigh(ours, SCORES[kind].forward(logits), EXPERTS, kind, normalized, scale)
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
