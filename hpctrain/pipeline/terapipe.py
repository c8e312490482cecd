"""TeraPipe: microbatches cut along the tokens, which a causal model can work on one slice after another."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

from hpctrain.pipeline.actions import BACKWARD, FORWARD, Action
from hpctrain.pipeline.schedules import Schedule
from hpctrain.pipeline.synchronous import at_least_one, chain_placement, check, with_flush


def terapipe(ranks: int, microbatches: int, slices: int) -> Schedule:
    """GPipe over token slices: a forward needs the slices before it (their keys and values), a backward those after.

    The slices' lengths are `Costs.slices` to the simulator; `token_slices` finds the best.

    Source: Li et al., "TeraPipe" (ICML 2021).
    """
    check(ranks=ranks, microbatches=microbatches, slices=slices)
    order = []
    for stage in range(ranks):
        forwards = [Action(FORWARD, 0, stage, m, part) for m in range(microbatches) for part in range(slices)]
        backwards = [
            Action(BACKWARD, 0, stage, m, part) for m in range(microbatches) for part in reversed(range(slices))
        ]
        order.append(forwards + backwards)
    return with_flush("terapipe", order, chain_placement(ranks), microbatches, slices)


def token_slices(
    tokens: int, time: Callable[[int, int], float], ranks: int, microbatches: int = 1, step: int = 1
) -> list[int]:
    """Lengths of the token slices with the least pipeline time, microbatches · Σ t + (ranks - 1) max t.

    For each bound on the dearest slice, dynamic programming over the prefixes finds the least sum. (tokens / step)² / 2
    bounds at most, each as many steps.

    Args:
        tokens: of a microbatch.
        time: time(length, before) of a slice of `length` tokens that attends to `before` tokens before it as well.
        step: lengths are multiples of it.

    Raises:
        ValueError: when `step` does not divide `tokens`.

    Source: TeraPipe, §3.3.

    >>> token_slices(8, lambda length, before: 3 + length, ranks=1)  # nothing to overlap: one slice
    [8]
    >>> token_slices(8, lambda length, before: 3 + length, ranks=8)
    [2, 2, 2, 2]
    >>> token_slices(12, lambda length, before: 9 + length * (2 + before + length / 2), ranks=4)  # attention
    [5, 3, 2, 2]
    """
    at_least_one(tokens=tokens, ranks=ranks, microbatches=microbatches, step=step)
    if tokens % step:
        raise ValueError(f"step={step} does not divide tokens={tokens}; use a divisor")
    count = tokens // step
    times = {(a, b): time((b - a) * step, a * step) for b in range(1, count + 1) for a in range(b)}
    best, chosen = math.inf, [tokens]
    for bound in sorted(set(times.values())):
        if microbatches * bound + (ranks - 1) * bound >= best:
            break
        least, last = [0.0] + [math.inf] * count, [0] * (count + 1)
        for b in range(1, count + 1):
            for a in range(b):
                if times[a, b] <= bound and least[a] + times[a, b] < least[b]:
                    least[b], last[b] = least[a] + times[a, b], a
        total = microbatches * least[count] + (ranks - 1) * bound
        if total < best:
            best, chosen, end = total, [], count
            while end:
                chosen.append((end - last[end]) * step)
                end = last[end]
    return chosen[::-1]


def balanced_slices(tokens: int, slices: int, per_token: float, per_pair: float) -> list[int]:
    """Lengths of so many slices that take the same time: `per_token` for each token and `per_pair` for each token
    before it that it attends to. Those that come later are shorter.

    Raises:
        ValueError: for more slices than tokens, and costs below 0 or all 0.

    >>> balanced_slices(64, 4, per_token=1, per_pair=0), balanced_slices(64, 4, per_token=1, per_pair=1)
    ([16, 16, 16, 16], [32, 13, 10, 9])
    """
    at_least_one(tokens=tokens, slices=slices)
    if slices > tokens:
        raise ValueError(f"slices={slices}: {tokens} tokens cannot be cut into more slices than tokens")
    if not (per_token >= 0 and per_pair >= 0 and 0 < per_token + per_pair < math.inf):
        raise ValueError(
            f"per_token and per_pair must be costs from 0 on, of which one is above, got {per_token} and {per_pair}"
        )
    total = per_token * tokens + per_pair * tokens**2 / 2
    ends = [0]
    for number in range(1, slices + 1):
        part = total * number / slices  # the time of the first `end` tokens: per_token end + per_pair end² / 2
        end = 2 * part / (per_token + math.sqrt(per_token**2 + 2 * per_pair * part))
        ends.append(min(max(round(end), ends[-1] + 1), tokens - (slices - number)))
    return [b - a for a, b in itertools.pairwise(ends)]
