"""Ulysses, ring and both against dense attention: outputs and gradients, for every way to divide the ranks."""

import pytest
import torch
from context_checks import KEY, SEQUENCES, WIDTH, all_masks, check, grids, local, run, serial, tensors

from hpctrain.layers import Mask
from hpctrain.layers.context import attention as attention_module
from hpctrain.layers.context.dropout import AttentionDropout
from hpctrain.layers.context.formula import bytes_received
from hpctrain.layers.context.spans import sequence_spans

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3, 4)]

WAYS = ["shared memory", "hops", "gathered"]
PACKED = [Mask(documents=(50, 30, 23)), Mask(documents=(103,)), Mask(documents=(1, 101, 1))]


def grids_by(world, way, monkeypatch):
    """Keys and values that go by messages come hop by hop or at once."""
    attention_module._layout.cache_clear()
    monkeypatch.setattr(attention_module, "gathers", lambda *_: way == "gathered")
    yield from grids(world, way == "shared memory")
    attention_module._layout.cache_clear()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("length", [103, 7, 1])
def test_lengths_and_masks(world, length, way, monkeypatch):
    for grid in grids_by(world, way, monkeypatch):
        masks = list(all_masks(length))
        for mask in masks if way == "shared memory" else masks[:: len(masks) - 1]:
            check(grid, tensors(4, 2, length), [mask] * SEQUENCES, 1e-12)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 1), (6, 3), (5, 5)])
def test_heads_that_do_not_divide_and_shared_ones(world, heads, kv_heads, way, monkeypatch):
    for grid in grids_by(world, way, monkeypatch):
        check(grid, tensors(heads, kv_heads, 29), [Mask()] * SEQUENCES, 1e-12)


@pytest.mark.parametrize("balance", ["none", "work"])
def test_other_cuts(world, balance):
    for grid in grids(world):
        for mask in (Mask(), Mask(documents=(50, 30, 23)), Mask(False, 9)):
            check(grid, tensors(4, 4, 103), [mask] * SEQUENCES, 1e-12, balance=balance)


def test_sequences_with_documents_of_their_own(world):
    for grid in grids(world):
        check(grid, tensors(4, 2, 103, sequences=3), PACKED, 1e-12)
        check(grid, tensors(4, 2, 103, sequences=3), PACKED, 1e-12, balance="work")


def test_windows_in_bands(world):
    """Longer than a tile of a band, so that it has edges, a middle, and triangles that are cut."""
    for grid in grids(world):
        check(grid, tensors(1, 1, 900, sequences=1), [Mask(window=600)], 1e-12)


def test_no_sequences(world):
    for grid in grids(world):
        (out, *grads), _ = run(grid, tensors(4, 2, 12, sequences=0), ())
        assert out.shape[0] == 0
        assert [grad.shape[1] for grad in grads] == [4, 2, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrower_floats(world, dtype):
    """1e-5 of the largest element; bfloat16 has 8 bits: one rounding of every product's inputs and of the result."""
    for grid in grids(world):
        for mask in (Mask(), Mask(window=20), Mask(False)):
            check(grid, tensors(4, 2, 203, dtype), [mask] * SEQUENCES, 1e-5 if dtype == torch.float32 else 1.5e-2)


@pytest.mark.parametrize("mask", [Mask(), Mask(False), Mask(True, 5, (10, 21))])
def test_dropout_has_the_masks_that_one_rank_draws(world, mask):
    length, heads = 31, 4
    dropout = AttentionDropout(KEY / "dropout", 0.3, 7, length, heads + 2, (4, 9), first_head=1)
    whole = range(length)
    keep = dropout.factors(slice(0, 2), slice(0, heads), (whole,), (whole,), torch.empty(0, dtype=torch.float64))
    drawn = (KEY / "dropout").mask(0, 10 * (heads + 2) * length**2, 0.3, 7).view(10, heads + 2, length, length)
    assert torch.equal(keep > 0, drawn[[4, 9], 1:-1])
    with torch.device("meta"):  # another default device
        assert torch.equal(dropout.factors(slice(0, 2), slice(0, heads), (whole,), (whole,), keep), keep)
    for grid in grids(world):
        check(grid, tensors(heads, 2, length), [mask] * 2, 1e-12, dropout=dropout, keep=keep)


def test_dropout_of_scores_that_are_computed_in_parts(world, monkeypatch):
    from hpctrain.layers.context import block

    monkeypatch.setattr(block, "MOST_SCORES", 100)
    dropout = AttentionDropout(KEY / "dropout", 0.5, 0, 31, 2, (0, 1))
    keep = dropout.factors(slice(0, 2), slice(0, 2), (range(31),), (range(31),), torch.empty(0, dtype=torch.float64))
    for grid in grids(world):
        check(grid, tensors(2, 1, 31), [Mask()] * 2, 1e-12, dropout=dropout, keep=keep)


def test_the_same_bits_every_time(world):
    for grid in grids(world):
        first, again = (run(grid, tensors(4, 2, 103, torch.float32), [Mask()] * SEQUENCES)[0] for _ in range(2))
        assert all(map(torch.equal, first, again))


def changed_at(whole, position):
    """q, k and v with another token at `position`."""
    changed = [part.clone() for part in whole]
    for part in changed[:3]:
        part[:, :, position] += 1.0
    return changed


@pytest.mark.parametrize(
    ("mask", "position", "untouched"),
    [
        (Mask(), 60, range(0, 60)),  # the past
        (Mask(window=10), 40, range(50, 103)),  # beyond the window
        (Mask(documents=(50, 53)), 20, range(50, 103)),  # another document
        (Mask(False, 0, (50, 53)), 70, range(0, 50)),
    ],
)
def test_who_does_not_see_a_token_has_the_same_bits(world, mask, position, untouched):
    for grid in grids(world):
        whole = tensors(4, 2, 103, torch.float32)
        masks = [mask] * SEQUENCES
        (before, *_), mine = run(grid, whole, masks)
        (after, *_), _ = run(grid, changed_at(whole, position), masks)
        same = torch.tensor([p in untouched for span in mine for p in span], dtype=torch.bool)
        assert torch.equal(before[:, :, same], after[:, :, same])
        here = torch.tensor([p == position for span in mine for p in span], dtype=torch.bool)
        assert not here.any() or not torch.equal(before[:, :, here], after[:, :, here])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(12, 12), (12, 1)])
def test_bytes_are_the_formula(world, heads, kv_heads, dtype, way, monkeypatch):
    length = 96
    for grid in grids_by(world, way, monkeypatch):
        ring, ulysses = grid.ring.size, grid.ulysses.size
        grid.transport.traffic.clear()
        run(grid, tensors(heads, kv_heads, length, dtype), [Mask()] * SEQUENCES)
        shape = {"sequences": SEQUENCES, "heads": heads, "groups": kv_heads, "width": WIDTH, "dtype": dtype}
        expected = bytes_received(sequence_spans(length, ring, ulysses), ring, ulysses, grid.sequence.rank, **shape)
        assert expected == {axis: grid.transport.traffic.total("received", (axis,)) for axis in ("ulysses", "ring")}
        if kv_heads % ulysses == 0:  # b s / P · (4 (U - 1)/U · (h + g) + 6 (R - 1) g), sums of 16 bits in 32
            tokens, item, wide = SEQUENCES * length // grid.size, dtype.itemsize, max(4, dtype.itemsize)
            h, g = heads * WIDTH, kv_heads * WIDTH
            assert expected["ulysses"] == tokens * 4 * (ulysses - 1) * (h + g) // ulysses * item
            assert expected["ring"] == tokens * (ring - 1) * g * (4 * item + 2 * wide)


def test_no_gradients_are_asked_for(world):
    for grid in grids(world):
        q, k, v, _ = tensors(4, 2, 29)
        expected, *_ = serial(q, k, v, torch.zeros_like(q), (Mask(),) * SEQUENCES)
        spans = tuple(sequence_spans(29, grid.ring.size, grid.ulysses.size))
        mine = spans[grid.sequence.rank]
        context = attention_module.Context(grid.ring, grid.ulysses, spans, (Mask(),) * SEQUENCES, WIDTH**-0.5)
        out = attention_module.attend(*(local(part, mine) for part in (q, k, v)), context)
        torch.testing.assert_close(out, local(expected, mine), rtol=1e-12, atol=1e-12)
