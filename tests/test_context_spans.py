"""Spans of sequence ranks: every position once, balanced; the rule of who sees whom, counted by a dense mask."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.choices import SEQUENCE_BALANCES
from hpctrain.layers.context.mask import Mask
from hpctrain.layers.context.spans import merged, part_of, sequence_spans, split_spans


@st.composite
def masks(draw, length):
    cuts = draw(st.sets(st.integers(1, max(1, length - 1)), max_size=4)) if length > 1 else set()
    edges = [0, *sorted(cuts), length]
    documents = tuple(b - a for a, b in zip(edges, edges[1:])) if length else ()
    return Mask(draw(st.booleans()), draw(st.integers(0, 12)), documents)


@st.composite
def cases(draw):
    length = draw(st.integers(0, 60))
    return length, draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(masks(length))


def dense(mask, length):
    """The rule element by element: [query, key]."""
    query, key = np.arange(length)[:, None], np.arange(length)[None]
    document = np.repeat(np.arange(len(mask.documents)), mask.documents) if mask.documents else np.zeros(length)
    seen = document[query] == document[key]
    if mask.causal:
        seen &= key <= query
    if mask.window:
        seen &= abs(query - key) < mask.window
    return seen


@given(cases(), st.data())
def test_work_counts_the_pairs_of_all_documents_that_a_part_touches(case, data):
    length, _, _, mask = case
    start, stop = sorted(data.draw(st.tuples(st.integers(0, length), st.integers(0, length))))
    work = mask.work(range(start, stop), mask.document_ranges(length) if length else [])
    assert work == dense(mask, length)[start:stop].sum()


@given(cases(), st.sampled_from(SEQUENCE_BALANCES))
def test_every_position_is_on_one_rank(case, balance):
    length, ring, ulysses, mask = case
    spans = sequence_spans(length, ring, ulysses, balance, [mask])
    assert len(spans) == ring * ulysses
    assert sorted(position for part in spans for span in part for position in span) == list(range(length))
    assert all(span for part in spans for span in part)
    assert all(merged(part) == part for part in spans)


@given(cases(), st.sampled_from(SEQUENCE_BALANCES))
def test_tokens_are_even(case, balance):
    length, ring, ulysses, mask = case
    spans = sequence_spans(length, ring, ulysses, balance, [mask])
    for rank in range(ring):
        sizes = [sum(map(len, part)) for part in spans[rank * ulysses : (rank + 1) * ulysses]]
        assert max(sizes) - min(sizes) <= 1
    if balance != "work":
        rings = [
            sum(len(span) for part in spans[r * ulysses : (r + 1) * ulysses] for span in part) for r in range(ring)
        ]
        assert max(rings) - min(rings) <= 1


def test_spans_by_hand():
    assert sequence_spans(103, 3, 1) == [
        (range(0, 18), range(86, 103)), (range(18, 35), range(69, 86)), (range(35, 69),)
    ]  # fmt: skip
    assert sequence_spans(7, 2, 2) == [(range(0, 2),), (range(6, 7),), (range(2, 4),), (range(4, 6),)]
    assert sequence_spans(2, 4, 1) == [(range(0, 1),), (range(1, 2),), (), ()]
    assert sequence_spans(5, 1, 3, "work") == [(range(0, 2),), (range(2, 4),), (range(4, 5),)]


@given(st.integers(0, 40), st.integers(1, 5), st.integers(0, 40), st.integers(0, 40))
def test_parts_of_spans(length, parts, start, stop):
    spans = (range(2, 2 + length // 3), range(100, 100 + length - length // 3))
    whole = [position for span in spans for position in span]
    assert [p for part in split_spans(spans, parts) for span in part for p in span] == whole
    assert [p for span in part_of(spans, start, stop) for p in span] == whole[start:stop]


@given(cases(), st.data())
def test_pairs_are_those_of_the_dense_mask(case, data):
    length, _, _, mask = case
    seen = dense(mask, length)
    edges = [data.draw(st.integers(0, length)) for _ in range(4)]
    queries, keys = range(*sorted(edges[:2])), range(*sorted(edges[2:]))
    alone = Mask(mask.causal, mask.window)
    assert (
        alone.pairs(queries, keys) == dense(alone, length)[queries.start : queries.stop, keys.start : keys.stop].sum()
    )
    assert mask.work(queries, mask.document_ranges(length)) == seen[queries.start : queries.stop].sum()


def ring_work(length, ring, balance, mask):
    seen = dense(mask, length).sum(1)
    return [sum(seen[span].sum() for span in part) for part in sequence_spans(length, ring, 1, balance, [mask])]


@pytest.mark.parametrize("ring", [2, 3, 4, 8])
def test_zigzag_is_even_and_contiguous_is_not(ring):
    for length in (512, 1009):
        zigzag, contiguous = (ring_work(length, ring, balance, Mask()) for balance in ("zigzag", "none"))
        assert max(zigzag) * ring <= 1.02 * sum(zigzag)
        assert max(contiguous) * ring > (2 - 1 / ring) / 1.02 * sum(contiguous)


@pytest.mark.parametrize(
    "mask", [Mask(documents=(700, 100, 200)), Mask(window=100), Mask(False), Mask(), Mask(False, 0, (300, 700))]
)
def test_cut_by_work(mask):
    for ring in (2, 4):
        work = ring_work(1000, ring, "work", mask)
        assert max(work) * ring <= 1.1 * sum(work)


def test_work_of_a_batch_is_of_all_its_sequences():
    masks = [Mask(documents=(1000,)), Mask(documents=(10,) * 100)]
    work = [
        [dense(mask, 1000).sum(1)[span].sum() for span in part]
        for part in sequence_spans(1000, 2, 1, "work", masks)
        for mask in masks
    ]
    totals = np.array([sum(each) for each in work]).reshape(2, 2).sum(1)
    assert totals.max() <= 1.02 * totals.mean()


def test_bad_input():
    with pytest.raises(ValueError, match="sequence.balance must be one of zigzag, work, none, got 'striped'"):
        sequence_spans(8, 2, 1, "striped")
    for lengths in ((3, 4), (0, 8), (9,)):
        with pytest.raises(ValueError, match="whose sum is 8"):
            sequence_spans(8, 2, 1, "work", [Mask(documents=lengths)])
