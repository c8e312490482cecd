"""Partition by reinforcement learning."""

from __future__ import annotations

import numpy as np

from hpctrain.pipeline.partitioners.problem import Problem
from hpctrain.pipeline.partitioners.search import WORK

BATCH, EPISODES = 16, 600  # partitions drawn at once, and how often
RATE = 1.0  # of learning
MOVING = 0.9  # what the moving mean and deviation of the reward keep of the past


def reinforce(problem: Problem, seed: int) -> list[list[int]]:
    """The partitions that a policy drew while it learned where to cut.

    The policy draws one cut after another, each by a softmax over the places left to it; at first a wide bell around
    the even cut. Its logits follow the gradient of the expected reward: what the simulated makespan is below its
    moving mean (REINFORCE with a baseline). A partition that does not fit counts as longer, in proportion to the
    memory it lacks.

    Sources: Williams, "Simple statistical gradient-following algorithms" (1992); Mirhoseini et al., "Device placement
    optimization with reinforcement learning" (ICML 2017).
    """
    random = np.random.default_rng(seed)
    layers, stages = problem.layers, problem.stages
    places = np.arange(layers + 1)
    even = np.arange(1, stages)[:, None] * layers / stages
    logits = -(((places - even) * stages / layers) ** 2) / 2
    drawn: dict[tuple[int, ...], None] = {}
    mean: float | None = None
    deviation = 0.0
    for _ in range(EPISODES):
        cuts, scores = _draw(logits, layers, random)
        batch = np.diff(cuts).tolist()
        drawn |= dict.fromkeys(map(tuple, batch))
        times = np.array([_time(problem, counts) for counts in batch])
        if mean is None:
            mean, deviation = times.mean(), times.std()
        if deviation == 0 or problem.simulated > WORK:
            break
        logits += RATE / BATCH * np.einsum("b,bkl->kl", (mean - times) / deviation, scores)
        mean = MOVING * mean + (1 - MOVING) * times.mean()
        deviation = MOVING * deviation + (1 - MOVING) * times.std()
    return [list(counts) for counts in drawn]


def _draw(logits, layers: int, random) -> tuple[np.ndarray, np.ndarray]:
    """Cuts with both ends, (batch, stages + 1), and the gradient of the logarithm of their chance by the logits."""
    inner = len(logits)
    cuts = np.zeros((BATCH, inner + 2), int)
    cuts[:, -1] = layers
    scores = np.zeros((BATCH, *logits.shape))
    places, rows = np.arange(layers + 1), np.arange(BATCH)
    for k in range(inner):
        left = (places > cuts[:, [k]]) & (places <= layers - inner + k)  # a layer at least for each stage that follows
        allowed = np.where(left, logits[k], -np.inf)
        cuts[:, k + 1] = place = (allowed + random.gumbel(size=allowed.shape)).argmax(1)  # drawn by its softmax
        chances = np.exp(allowed - allowed.max(1, keepdims=True))
        chances /= chances.sum(1, keepdims=True)
        scores[:, k] = -chances
        scores[rows, k, place] += 1
    return cuts, scores


def _time(problem: Problem, counts: list[int]) -> float:
    verdict = problem.judge(counts)
    return verdict.makespan * (1 + verdict.excess / (verdict.peak or 1))
