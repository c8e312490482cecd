"""What any algorithm must communicate."""

from __future__ import annotations

import math


def lower_bound(m: int, k: int, n: int, ranks: int, memory: float | None = None) -> float:
    """Elements that some rank must receive in any product of m×k and k×n matrices, of which each rank begins with and
    ends with an equal part, and does an equal part of the multiplications.

    Source: Al Daas, Ballard, Grigori, Kumar and Rouse, "Brief announcement: tight memory-independent parallel matrix
    multiplication communication lower bounds" (2022), theorem 3. With `memory`, the elements a rank can hold at once,
    also Irony, Toledo and Tiskin, "Communication lower bounds for distributed-memory matrix multiplication" (2004),
    theorem 3.1; the larger of the two.

    >>> lower_bound(4, 2, 1, 2)  # one rank more or less: the smallest matrix moves
    1.0
    >>> lower_bound(64, 64, 64, 8)  # a cube: 3 (64/2)² elements needed, half of them already there
    1536.0
    """
    for name, value in (("m", m), ("k", k), ("n", n), ("ranks", ranks)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if memory is not None and not memory > 0:
        raise ValueError(f"memory must be more than 0, got {memory}")
    d1, d2, d3 = sorted((m, k, n), reverse=True)
    if ranks * d2 <= d1:
        needed = (d1 * d2 + d1 * d3) / ranks + d2 * d3
    elif ranks * d3**2 <= d1 * d2:
        needed = 2 * math.sqrt(d1 * d2 * d3**2 / ranks) + d1 * d2 / ranks
    else:
        needed = 3 * math.cbrt(d1 * d2 * d3 / ranks) ** 2
    bound = needed - (d1 * d2 + d1 * d3 + d2 * d3) / ranks
    if memory is not None:
        bound = max(bound, m * k * n / (2 * math.sqrt(2) * ranks * math.sqrt(memory)) - memory)
    return max(bound, 0.0)
