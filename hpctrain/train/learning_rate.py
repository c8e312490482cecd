"""The learning rate of every step."""

from __future__ import annotations

import math


def learning_rate(
    step: int, steps: int, peak: float, warmup: int, schedule: str = "cosine", floor: float | None = None,
    decay_steps: int = 0,
) -> float:  # fmt: skip
    """Linear warm-up to `peak` over `warmup` steps, then by one of `hpctrain.choices.LR_SCHEDULES`.

    Args:
        step: from 0 to `steps` - 1.
        floor: at the last step, and of "inverse_sqrt" at least; a tenth of the peak by default.
        decay_steps: the last ones, in which "wsd" falls; a tenth of `steps` by default.

    Sources: as Megatron-LM's --lr-decay-style, but that the decay of "wsd" (Hu et al., "MiniCPM", 2024, §4) is linear.

    >>> [round(learning_rate(step, 5, 1.0, 2), 3) for step in range(5)]
    [0.5, 1.0, 1.0, 0.55, 0.1]
    >>> [learning_rate(step, 6, 1.0, 2, "wsd", 0.0, 2) for step in range(6)]
    [0.5, 1.0, 1.0, 1.0, 0.5, 0.0]
    """
    floor = peak / 10 if floor is None else floor
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "constant":
        return peak
    if schedule == "inverse_sqrt":
        return max(floor, peak * math.sqrt(max(1, warmup) / (step + 1)))
    last = steps - 1
    start = max(warmup, last - (decay_steps or max(1, steps // 10))) if schedule == "wsd" else warmup
    progress = min(1.0, max(0, step - start) / max(1, last - start))
    remaining = 0.5 * (1 + math.cos(math.pi * progress)) if schedule == "cosine" else 1 - progress
    return floor + (peak - floor) * remaining
