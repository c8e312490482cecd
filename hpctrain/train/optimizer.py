"""AdamW and its learning rate."""

from __future__ import annotations

import math

import torch


def adamw(parameters, weight_decay: float) -> torch.optim.Optimizer:
    """AdamW with betas (0.9, 0.95); weights decay, vectors (biases and norms) do not."""
    parameters = list(parameters)
    matrices = [p for p in parameters if len(p.shard.global_shape) > 1]
    vectors = [p for p in parameters if len(p.shard.global_shape) == 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([g for g in groups if g["params"]], betas=(0.9, 0.95), fused=True)


def learning_rate(step: int, steps: int, peak: float, warmup: int) -> float:
    """Linear warm-up to `peak` over `warmup` steps, then a cosine down to a tenth of it at the last of `steps`.

    >>> [round(learning_rate(step, 5, 1.0, 2), 3) for step in range(5)]
    [0.5, 1.0, 1.0, 0.55, 0.1]
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - 1 - warmup)
    return peak * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))
