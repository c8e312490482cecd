"""Which positions of a sequence each rank of the sequence axes holds."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from hpctrain.choices import SEQUENCE_BALANCES
from hpctrain.layers.context.mask import Mask
from hpctrain.shard import split

EVEN = 1.02  # most work of a rank to the mean: even enough
MOST_CHUNKS = 16  # a ring rank, beyond which a tile of attention is a small matrix

Spans = tuple[range, ...]


def sequence_spans(
    length: int, ring: int, ulysses: int, balance: str = "zigzag", masks: Sequence[Mask] = (Mask(),)
) -> list[Spans]:
    """Positions that each rank of the sequence axes holds of a sequence of `length`, in the order in which it does.

    Rank r·ulysses + u has the spans of ring rank r, of which its Ulysses ranks share the tokens contiguously. Each
    position is on one rank; a rank may have none.

    Args:
        balance: how the ring ranks share the sequence. "zigzag": of 2·ring chunks, rank r has r and 2·ring - 1 - r,
            which makes causal attention even. "none": one contiguous part each. "work": by the pairs of query and key
            that `masks`, one for each sequence, leave: as many chunks for each rank, the heaviest first to the rank
            with the least work; as few chunks as make it even.

    >>> sequence_spans(10, 2, 1)
    [(range(0, 3), range(8, 10)), (range(3, 8),)]
    >>> sequence_spans(10, 2, 2)
    [(range(0, 3),), (range(8, 10),), (range(3, 6),), (range(6, 8),)]
    >>> sequence_spans(10, 2, 1, "none")
    [(range(0, 5),), (range(5, 10),)]
    >>> sequence_spans(12, 2, 1, "work", [Mask(documents=(8, 4))])
    [(range(0, 6), range(9, 10)), (range(6, 9), range(10, 12))]
    """
    if balance not in SEQUENCE_BALANCES:
        raise ValueError(f"sequence.balance must be one of {', '.join(SEQUENCE_BALANCES)}, got {balance!r}")
    if ring == 1 or balance == "none":
        over_ring = [[index] for index in range(ring)]
    elif balance == "zigzag":
        over_ring = [[rank, 2 * ring - 1 - rank] for rank in range(ring)]
    else:
        over_ring = _by_work(length, ring, masks)
    chunks = _chunks(length, sum(map(len, over_ring)))
    spans = [merged(chunks[index] for index in indices) for indices in over_ring]
    return [part for whole in spans for part in split_spans(whole, ulysses)]


def split_spans(spans: Spans, parts: int) -> list[Spans]:
    """Balanced parts of the tokens of `spans`, in their order.

    >>> split_spans((range(0, 3), range(8, 10)), 2)
    [(range(0, 3),), (range(8, 10),)]
    """
    cuts = (split(span_length(spans), parts, index) for index in range(parts))
    return [part_of(spans, cut.start, cut.stop) for cut in cuts]


def part_of(spans: Spans, start: int, stop: int) -> Spans:
    """Tokens `start` to `stop` of those of `spans`.

    >>> part_of((range(0, 3), range(8, 10)), 2, 4)
    (range(2, 3), range(8, 9))
    """
    ends = itertools.accumulate(len(span) for span in spans)
    cuts = (span[max(0, start - end + len(span)) : max(0, stop - end + len(span))] for span, end in zip(spans, ends))
    return tuple(cut for cut in cuts if cut)


def span_length(spans: Iterable[range]) -> int:
    return sum(len(span) for span in spans)


def merged(spans: Iterable[range]) -> Spans:
    """The same positions in the same order, runs that follow each other as one, none of them empty.

    >>> merged([range(0, 2), range(2, 5), range(7, 7), range(8, 9)])
    (range(0, 5), range(8, 9))
    """
    runs: list[range] = []
    for span in spans:
        if span and runs and runs[-1].stop == span.start:
            runs[-1] = range(runs[-1].start, span.stop)
        elif span:
            runs.append(span)
    return tuple(runs)


def _chunks(length, count):
    cuts = (split(length, count, index) for index in range(count))
    return [range(cut.start, cut.stop) for cut in cuts]


def _by_work(length, ring, masks):
    """Numbers of the chunks of each ring rank, for as few chunks as make the work even, else the evenest."""
    ranges = [mask.document_ranges(length) for mask in masks]
    best, evenest = None, float("inf")
    each = 1
    while each <= MOST_CHUNKS and evenest > EVEN:
        chunks = _chunks(length, each * ring)
        work = [sum(mask.work(chunk, cut) for mask, cut in zip(masks, ranges)) for chunk in chunks]
        dealt = _dealt(work, ring)
        most = max(sum(work[index] for index in part) for part in dealt) / max(1, sum(work)) * ring
        if most < evenest:
            best, evenest = dealt, most
        each *= 2
    return best


def _dealt(work, ring):
    """Equally many chunks for each rank, in order; the ranks by their first chunk."""
    dealt: list[list[int]] = [[] for _ in range(ring)]
    loads = [0] * ring
    for index in sorted(range(len(work)), key=lambda index: (-work[index], index)):
        rank = min(
            (rank for rank in range(ring) if len(dealt[rank]) < len(work) // ring), key=lambda rank: (loads[rank], rank)
        )
        dealt[rank].append(index)
        loads[rank] += work[index]
    return sorted(sorted(part) for part in dealt)
