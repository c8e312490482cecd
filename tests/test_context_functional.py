"""`ht.layers.context_attention` as a stand-in for torch's scaled_dot_product_attention."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from context_checks import KEY, grids, local, tensors

import hpctrain as ht
from hpctrain.layers import Mask, context_attention, sequence_spans

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 4)]


def cut(grid, whole, **options):
    spans = sequence_spans(whole[0].shape[2], grid.ring.size, grid.ulysses.size, **options)[grid.sequence.rank]
    return [local(part, spans) for part in whole], spans


def test_it_is_torch_s_function(world):
    whole = tensors(4, 2, 37)
    for grid in grids(world):
        (q, k, v, grad), spans = cut(grid, whole)
        leaves = [part.requires_grad_() for part in (q, k, v)]
        out = context_attention(*leaves, grid, is_causal=True, scale=0.2, enable_gqa=True)
        out.backward(grad)
        wholes = [part.clone().requires_grad_() for part in whole[:3]]
        expected = F.scaled_dot_product_attention(*wholes, is_causal=True, scale=0.2, enable_gqa=True)
        expected.backward(whole[3])
        torch.testing.assert_close(out, local(expected, spans), rtol=1e-12, atol=1e-12)
        for leaf, one in zip(leaves, wholes):
            torch.testing.assert_close(leaf.grad, local(one.grad, spans), rtol=1e-11, atol=1e-12)


def test_documents_windows_and_cuts(world):
    """One list of documents is that of every sequence; cut by work, and by spans of one's own."""
    whole = tensors(4, 4, 40)[:3]
    documents = (25, 15)
    alone = [[part[:, :, document] for part in whole] for document in (slice(0, 25), slice(25, 40))]
    expected = torch.cat([F.scaled_dot_product_attention(*parts, is_causal=True) for parts in alone], 2)
    for grid in grids(world):
        ways = [({}, {}), ({"balance": "work", "masks": [Mask(documents=documents)] * 2}, {"balance": "work"})]
        for how, said in ways:
            mine, spans = cut(grid, whole, **how)
            for given in (documents, [documents] * 2, torch.tensor(documents), [np.array(documents)] * 2):
                out = context_attention(*mine, grid, is_causal=True, documents=given, **said)
                torch.testing.assert_close(out, local(expected, spans), rtol=1e-12, atol=1e-12)
        spans = [(range(40),) if rank == 0 else () for rank in range(world.size)]
        mine = [local(part, spans[grid.sequence.rank]) for part in whole]
        out = context_attention(*mine, grid, is_causal=True, documents=documents, spans=spans)
        torch.testing.assert_close(out, local(expected, spans[grid.sequence.rank]), rtol=1e-12, atol=1e-12)


def test_dropout_does_not_depend_on_the_grid(world):
    whole = tensors(4, 2, 23)[:3]
    options = {"is_causal": True, "enable_gqa": True, "dropout_p": 0.4, "dropout_key": KEY / "drop", "step": 3}
    with ht.Grid(comm=world.Split(world.rank)) as alone:
        expected = context_attention(*whole, alone, **options)
    assert not torch.equal(expected, F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True))
    for grid in grids(world):
        mine, spans = cut(grid, whole)
        out = context_attention(*mine, grid, **options)
        torch.testing.assert_close(out, local(expected, spans), rtol=1e-12, atol=1e-12)


BAD = {
    "attn_mask is of one rank": {"attn_mask": torch.ones(1)},
    "they must divide them, with enable_gqa=True": {"enable_gqa": False},
    "dropout_p needs dropout_key": {"dropout_p": 0.1},
    "dropout must be at least 0": {"dropout_p": 1.0},
    "window must be a number of tokens": {"window": -1},
    "or 0 for all, got 2.5": {"window": 2.5},
    "key must be an RngKey, such as": {"dropout_p": 0.1, "dropout_key": 3},
    "documents must be lengths, or": {"documents": 16},
    "whose sum is 16, got": {"documents": (4, 4)},
    "lengths for each of 2 sequences": {"documents": [(8, 8)]},
    "sequence.balance must be one of": {"balance": "striped"},
    "cut it by ht.layers.sequence_spans": {"length": 17},
}


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("said", BAD)
def test_bad_input(world, said):
    for grid in grids(world):
        (q, k, v), _ = cut(grid, tensors(4, 2, 16)[:3])
        with pytest.raises(ValueError, match=said):
            context_attention(q, k, v, grid, **{"enable_gqa": True} | BAD[said])


def test_one_rank_that_differs_is_an_error_on_all(world):
    for grid in grids(world):
        (q, k, v), _ = cut(grid, tensors(4, 4, 16)[:3])
        last = grid.sequence.rank == world.size - 1
        if world.size > 1:
            with pytest.raises(ValueError, match="with the same options"):
                context_attention(q, k, v, grid, is_causal=last)
        with pytest.raises(ValueError, match="key and value alike"):
            context_attention(q, k[:, :, :-1] if last else k, v, grid)
        with pytest.raises(ValueError, match="must have one dtype"):
            context_attention(q, k.float() if last else k, v, grid)


@pytest.mark.ranks(2)
def test_what_ranks_compare_is_watched(world):
    grid = ht.Grid(data=(1, 2, 1))
    watchdog = ht.comm.Watchdog(grid, 600.0)
    context_attention(*[torch.ones(1, 1, 2, 4)] * 3, grid)
    assert ("sequence", "all_gather_object") in {(axis, name) for _, axis, name, _ in watchdog._done}
