"""Which heads each Ulysses rank works on."""

from __future__ import annotations

from hpctrain.shard import split

Heads = tuple[slice, slice]  # query heads, and the key and value heads that they share, evenly


def query_heads(heads: int, ulysses: int) -> list[slice]:
    """Balanced, whatever the number of key and value heads."""
    return [split(heads, ulysses, rank) for rank in range(ulysses)]


def kv_heads(heads: int, groups: int, ulysses: int) -> list[slice]:
    """The key and value heads, of `groups`, that each rank's query heads need; with fewer of them than ranks, several
    ranks need the same one.

    >>> kv_heads(8, 2, 4)
    [slice(0, 1, None), slice(0, 1, None), slice(1, 2, None), slice(1, 2, None)]
    >>> kv_heads(6, 3, 2)
    [slice(0, 2, None), slice(1, 3, None)]
    """
    each = heads // max(1, groups)
    needed = ((part.start // each, -(-part.stop // each)) if part.stop > part.start else (0, 0)
              for part in query_heads(heads, ulysses))  # fmt: skip
    return [slice(*part) for part in needed]


def head_groups(queries: slice, groups: slice, each: int) -> list[Heads]:
    """A rank's heads, counted from its first, in parts of which all key heads serve equally many query heads, of the
    `each` that share one in the whole model: a rank may have some of the first and of the last alone.

    >>> head_groups(slice(0, 3), slice(0, 2), 2)
    [(slice(0, 2, None), slice(0, 1, None)), (slice(2, 3, None), slice(1, 2, None))]
    >>> head_groups(slice(4, 8), slice(2, 4), 2)
    [(slice(0, 4, None), slice(0, 2, None))]
    """
    found: list[tuple[int, int, int, int]] = []
    for group in range(groups.start, groups.stop):
        first, last = max(queries.start, group * each), min(queries.stop, (group + 1) * each)
        of = found[-1] if found else None
        if of is not None and (of[1] - of[0]) == (last - first) * (of[3] - of[2]):
            found[-1] = of[0], last, of[2], group + 1
        else:
            found.append((first, last, group, group + 1))
    q0, k0 = queries.start, groups.start
    return [(slice(a - q0, b - q0), slice(c - k0, d - k0)) for a, b, c, d in found]
