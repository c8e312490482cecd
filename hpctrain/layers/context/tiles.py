"""Which rectangles of queries and keys attention has to compute, in shapes that fused kernels take.

Queries and keys are numbered as the ranks hold them. Their positions ascend, so that a query sees a run of keys, and
from one query to the next each end of that run stays or goes on by one. The pairs that see each other are therefore
full rectangles, triangles in which each query sees one key more, and bands.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_left, bisect_right
from dataclasses import dataclass

from hpctrain.layers.context.mask import Mask, band_pairs, overlap
from hpctrain.layers.context.spans import Spans

BAND_ROWS = 256  # queries of a tile of a band, at most
LEAST_ROWS = 64  # and at least, however narrow the band


@dataclass(frozen=True)
class Tile:
    """A rectangle of a rank's queries and an owner's keys; each of its queries sees at least one of its keys.

    Attributes: `queries` and `keys`, by number; `least` and `greatest`, the bounds of key - query, both counted from
    the tile's first, that are seen; None for no bound. (None, None) is full and (None, 0), then a square, is causal;
    others need a mask.
    """

    queries: slice
    keys: slice
    least: int | None = None
    greatest: int | None = None

    @property
    def kind(self) -> str:
        if self.least is not None:
            return "masked"
        return {None: "full", 0: "causal"}.get(self.greatest, "masked")

    @property
    def shape(self) -> tuple[int, int]:
        return self.queries.stop - self.queries.start, self.keys.stop - self.keys.start

    @property
    def pairs(self) -> int:
        queries, keys = self.shape
        return band_pairs(range(queries), range(keys), self.least, self.greatest)


@functools.lru_cache(maxsize=4096)
def tiles(queries: Spans, keys: Spans, mask: Mask, length: int, block: int = 0) -> tuple[Tile, ...]:
    """Tiles of the queries at positions `queries` of a sequence of `length` and the keys at `keys`.

    Args:
        block: triangles with more queries are cut into squares and triangles of at most so many: the kernel computes
            what it masks there. 0 for a kernel that does not.

    >>> for tile in tiles((range(2, 4), range(6, 8)), (range(0, 4),), Mask(), 8):
    ...     print(tile.queries, tile.keys, tile.kind)
    slice(0, 2, None) slice(2, 4, None) causal
    slice(0, 2, None) slice(0, 2, None) full
    slice(2, 4, None) slice(0, 4, None) full
    """
    return tuple(tile for run in _joined(_runs(queries, keys, mask, length)) for tile in _tiles_of(run, block))


def pairs_of_hops(spans: list[Spans], mask: Mask, length: int) -> list[list[int]]:
    """Pairs that ring rank r computes at hop h, with the keys of rank r - h: [r][h].

    >>> pairs_of_hops([(range(0, 2), range(6, 8)), (range(2, 6),)], Mask(), 8)
    [[10, 8], [10, 8]]
    """
    ranks = range(len(spans))
    return [[sum(t.pairs for t in tiles(spans[r], spans[r - h], mask, length)) for h in ranks] for r in ranks]


@dataclass
class _Run:
    """Queries `first` to `first + count - 1`. The first of them sees keys `low` to `high - 1`; from each to the next
    low goes on by `low_step` and high by `high_step`, 0 or 1."""

    first: int
    count: int
    low: int
    high: int
    low_step: int
    high_step: int


def _runs(queries, keys, mask, length):
    """Runs of queries, none across a place where one of the steps may change."""
    least, greatest = mask.offsets
    documents = mask.document_ranges(length)
    starts = [span.start for span in keys]
    numbers = [0, *itertools.accumulate(map(len, keys))]
    edges = sorted({edge for span in keys for edge in (span.start, span.stop)})

    def keys_before(position):
        index = bisect_right(starts, position) - 1
        return 0 if index < 0 else numbers[index] + min(position - starts[index], len(keys[index]))

    first = 0  # number of the first query of the span
    for span in queries:
        for document in documents[bisect_right(documents, span.start, key=lambda d: d.start) - 1 :]:
            part = overlap(span, document)
            if not part:
                break
            cuts = {part.start, part.stop}
            for offset in (least, greatest):
                if offset is not None:  # a bound that passes one of these positions
                    near = edges[bisect_left(edges, part.start + offset) : bisect_right(edges, part.stop + offset)]
                    cuts.update(edge - offset for edge in (*near, document.start, document.stop))
            within = sorted(cut for cut in cuts if part.start <= cut <= part.stop)

            def low(query, document=document):
                return keys_before(document.start if least is None else max(document.start, query + least))

            def high(query, document=document):
                return keys_before(document.stop if greatest is None else min(document.stop, query + greatest + 1))

            for start, stop in zip(within, within[1:]):
                if low(start) < high(start):
                    steps = [end(start + 1) - end(start) if stop - start > 1 else 0 for end in (low, high)]
                    yield _Run(first + start - span.start, stop - start, low(start), high(start), *steps)
        first += len(span)


def _joined(runs):
    """Runs that go on where the one before ends, as one."""
    joined: list[_Run] = []
    for run in runs:
        last = joined[-1] if joined else None
        if last is not None and last.first + last.count == run.first:
            low_step = run.low - last.low - (last.count - 1) * last.low_step
            high_step = run.high - last.high - (last.count - 1) * last.high_step
            goes_on = low_step in (0, 1) and high_step in (0, 1)
            goes_on &= last.count == 1 or (low_step, high_step) == (last.low_step, last.high_step)
            goes_on &= run.count == 1 or (low_step, high_step) == (run.low_step, run.high_step)
            if goes_on:
                last.count, last.low_step, last.high_step = last.count + run.count, low_step, high_step
                continue
        joined.append(run)
    return joined


def _tiles_of(run, block):
    if run.low_step:
        yield from _band(run, block)
    elif run.high_step:
        yield from _triangle(run.first, run.high - 1, run.count, block)
        yield from _rectangle(run.first, run.first + run.count, run.low, run.high - 1)
    else:
        yield from _rectangle(run.first, run.first + run.count, run.low, run.high)


def _rectangle(first, stop, low, high, least=None, greatest=None):
    if first < stop and low < high:
        yield Tile(slice(first, stop), slice(low, high), least, greatest)


def _triangle(first, low, count, block):
    """Query `first + i` sees keys `low` to `low + i`."""
    if count <= (block or count):
        yield from _rectangle(first, first + count, low, low + count, greatest=0)
        return
    half = -(-count // 2)
    yield from _triangle(first, low, half, block)
    yield from _triangle(first + half, low + half, count - half, block)
    yield from _rectangle(first + half, first + count, low, low + half)


def _band(run, block):
    """A few queries at a time, of which each sees from one key later than the one before."""
    rows = min(BAND_ROWS, max(LEAST_ROWS, run.high - run.low))
    for start in range(0, run.count, rows):
        count = min(rows, run.count - start)
        first, stop = run.first + start, run.first + start + count
        low, high = run.low + start, run.high + start * run.high_step
        if high - low < 2 * rows:
            last = high + (count - 1) * run.high_step
            yield from _rectangle(first, stop, low, last, 0, high - 1 - low if run.high_step else None)
            continue
        middle = low + count - 1  # from here on all of them see
        if run.high_step:
            yield from _triangle(first, high - 1, count, block)
        yield from _rectangle(first, stop, middle, high - run.high_step)
        yield from _rectangle(first, stop - 1, low, middle, 0)
