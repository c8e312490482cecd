"""Tiles against the dense mask: every pair that sees each other is in one tile, and no other is."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_context_spans import cases, dense

from hpctrain.choices import SEQUENCE_BALANCES
from hpctrain.layers.context import tiles as tiles_module
from hpctrain.layers.context.mask import Mask
from hpctrain.layers.context.spans import sequence_spans
from hpctrain.layers.context.tiles import Tile, pairs_of_hops, tiles


def positions(spans):
    return [position for span in spans for position in span]


def painted(found, rows, columns):
    """How many tiles see each pair, element by element."""
    seen = np.zeros((rows, columns), int)
    for tile in found:
        n, m = tile.shape
        offset = np.arange(m)[None] - np.arange(n)[:, None]
        inside = np.ones((n, m), bool)
        if tile.least is not None:
            inside &= offset >= tile.least
        if tile.greatest is not None:
            inside &= offset <= tile.greatest
        assert inside.any(1).all(), "a query of a tile sees none of its keys"
        assert tile.pairs == inside.sum()
        assert tile.kind != "causal" or n == m
        seen[tile.queries, tile.keys] += inside
    return seen


@given(cases(), st.sampled_from(SEQUENCE_BALANCES), st.sampled_from([0, 1, 3, 16]), st.booleans())
def test_tiles_are_the_dense_mask(case, balance, block, narrow):
    length, ring, ulysses, mask = case
    spans = sequence_spans(length, ring, ulysses, balance, [mask])
    seen = dense(mask, length)
    before = tiles_module.BAND_ROWS, tiles_module.LEAST_ROWS
    if narrow:
        tiles_module.BAND_ROWS, tiles_module.LEAST_ROWS = 4, 2
    tiles.cache_clear()
    try:
        for queries in spans:
            for keys in spans:
                found = tiles(queries, keys, mask, length, block)
                rows, columns = positions(queries), positions(keys)
                assert (painted(found, len(rows), len(columns)) == seen[np.ix_(rows, columns)]).all()
    finally:
        tiles_module.BAND_ROWS, tiles_module.LEAST_ROWS = before
        tiles.cache_clear()


@pytest.mark.parametrize("ring", [2, 3, 4, 8])
@pytest.mark.parametrize("length", [1000, 1009])
def test_zigzag_is_one_tile_a_hop_and_even_at_every_hop(length, ring):
    spans = sequence_spans(length, ring, 1)
    work = pairs_of_hops(spans, Mask(), length)
    assert sum(map(sum, work)) == length * (length + 1) // 2
    for hop in range(ring):
        at_hop = [work[rank][hop] for rank in range(ring)]
        assert max(at_hop) * ring <= 1.02 * sum(at_hop), (hop, at_hop)
        for rank in range(ring):
            kinds = [tile.kind for tile in tiles(spans[rank], spans[rank - hop], Mask(), length)]
            assert kinds == ["full" if hop else "causal"]


@pytest.mark.parametrize("ring", [2, 4])
def test_contiguous_is_not_even(ring):
    work = pairs_of_hops(sequence_spans(1000, ring, 1, "none"), Mask(), 1000)
    totals = [sum(hops) for hops in work]
    assert totals[-1] * ring > (2 - 1 / ring) / 1.02 * sum(totals)
    assert work[0][1:] == [0] * (ring - 1)


def test_tiles_by_hand():
    """A window of 3 over 8 tokens: the pairs, and one band where tiles are long enough."""
    (tile,) = tiles((range(8),), (range(8),), Mask(window=3, documents=()), 8)[-1:]
    assert tile == Tile(slice(2, 8), slice(0, 8), 0, 2)
    found = tiles((range(4, 8),), (range(0, 4),), Mask(window=3), 8)
    assert found == (Tile(slice(0, 2), slice(2, 4), 0),)
    assert tiles((range(4, 8),), (range(0, 4),), Mask(documents=(4, 4)), 8) == ()


def test_a_triangle_is_cut_where_the_kernel_wants_it():
    found = tiles((range(8),), (range(8),), Mask(), 8, 4)
    assert [(tile.queries, tile.keys, tile.kind) for tile in found] == [
        (slice(0, 4), slice(0, 4), "causal"), (slice(4, 8), slice(4, 8), "causal"), (slice(4, 8), slice(0, 4), "full"),
    ]  # fmt: skip


def test_windows_cost_what_they_see():
    """The tiles of a long window compute little more than its pairs."""
    found = tiles((range(8192),), (range(8192),), Mask(window=1024), 8192, 256)
    computed = sum(tile.shape[0] * tile.shape[1] for tile in found)
    assert computed < 1.3 * Mask(window=1024).pairs(range(8192), range(8192))
