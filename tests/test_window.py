"""A sliding window: every query sees the same keys on every grid, of a reference that writes its mask out."""

import dataclasses
import functools

import pytest
import torch
from test_documents import BOTH
from test_sequence_training import GRIDS, LLAMA
from training_checks import CORNERS, LENGTH, check, fitting, in_turn, logits_of, made, train_on

from hpctrain import Grid, RngKey, models
from hpctrain.layers import Attention
from hpctrain.models.llama import LlamaShape
from hpctrain.train.generate import generate

pytestmark = pytest.mark.mpi

SHAPE = dataclasses.replace(LLAMA, window=3)
WIDE = LlamaShape(
    layers=3, width=15, heads=6, context=8, vocabulary=23, kv_heads=3, ffn=21, head_width=6, rope_base=10.0, window=4
)


@pytest.mark.ranks(1, 2, 4, 8)
def test_equals_one_rank(world):
    """7 tokens, dropout, one key head, two microbatches, clipping."""
    for data, pipeline, tensor in in_turn(BOTH, world.size, 1, of_8=2):
        check(Grid(data, pipeline, tensor), fitting(SHAPE, pipeline), count=2, clip=1.0)


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize(("window", "length"), [(10, 103), (2, 7), (103, 103), (200, 103)])
def test_long_sequences(world, case, window, length):
    """Windows narrower and wider than a rank's part, of two keys, of all keys and of more."""
    shape = dataclasses.replace(SHAPE, window=window, context=length + 1)
    places = [((1, world.size, 1), "zigzag"), ((1, world.size, 1), "work"), ((1, 1, world.size), "none")]
    for data, balance in places if world.size < 4 else places[case % 3 :: 3]:
        check(Grid(data), shape, count=1, clip=0.3, balance=balance)


@pytest.mark.ranks(1, 2)
def test_one_key(world):
    """Its own: no gradient then tells queries from keys, but each token is for itself."""
    from mpi4py import MPI

    shape = dataclasses.replace(SHAPE, window=1)
    weights = dict(made(Grid(comm=MPI.COMM_SELF), shape).named_parameters())
    model = made(Grid((1, world.size, 1)), shape).eval()
    ids = torch.arange(LENGTH) * 5 % SHAPE.vocabulary
    tokens = model.tokens(1, LENGTH)
    with torch.no_grad():
        expected = logits_of(shape)(weights, ids[None])[0]
        torch.testing.assert_close(model(ids[tokens.positions()], tokens), expected[tokens.positions()], rtol=1e-12,
                                   atol=1e-12)  # fmt: skip


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("shape", [SHAPE, WIDE])
def test_token_slices(world, shape):
    for slices in ([5, LENGTH - 5], [1] * LENGTH):
        grid = Grid(1, 2, world.size // 2)
        check(grid, fitting(shape, 2), count=2, clip=1.0, pipeline="terapipe", slices=slices)


@pytest.mark.ranks(1, 2)
def test_recompute(world):
    """The same bits, with dropout."""
    for data, pipeline, tensor in CORNERS[world.size] + GRIDS.get(world.size, []):
        grid, shape = Grid(data, pipeline, tensor), fitting(SHAPE, pipeline)
        kept, *again = (train_on(grid, shape, 2, 1.0, recompute=how)[1:] for how in ("none", "attention", "block"))
        assert again == [kept, kept]


PROMPT, COUNT, KNOWN = [3, 1], 10, 20  # longer than the window, and than the context


@functools.cache
def greedy(window):
    """The likeliest words by the reference, one after the other, with weights so large that few alone decide."""
    from mpi4py import MPI

    model, ids = enlarged(Grid(comm=MPI.COMM_SELF), window), list(PROMPT)
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for _ in range(COUNT):
            logits = logits_of(model.shape)(weights, torch.tensor([ids[-model.shape.context :]]))
            ids.append(int(logits.reshape(-1, model.shape.vocabulary)[-1, :KNOWN].argmax()))
    return ids[len(PROMPT) :]


def enlarged(grid, window):
    model = made(grid, dataclasses.replace(WIDE, window=window))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(10)
    return model


@pytest.mark.ranks(1, 2, 4)
def test_generation_beyond_the_window(world):
    if world.rank == 0:
        assert greedy(2) != greedy(3) != greedy(0)
    for data, pipeline, tensor in in_turn({1: [(1, 1, 1)], **GRIDS}, world.size, 0):
        for window in (2, 3):
            model = enlarged(Grid(data, pipeline, tensor), window)
            assert generate(model, model.grid, PROMPT, COUNT, KNOWN, RngKey(8), 1e-9) == greedy(window)


@pytest.mark.ranks(1)
def test_a_window_is_a_number_of_positions():
    with pytest.raises(ValueError, match="window must be a number of positions, or 0 for all, got -1"):
        Attention(Grid(), 8, 2, window=-1)


@pytest.mark.ranks(1)
def test_flops_are_those_of_the_keys_that_are_seen():
    """4 or all 8 of the context, at 12 operations for each feature of 36 in each of 3 layers."""
    flops = [models.get("llama").costs(dataclasses.replace(WIDE, window=w)).flops_per_token for w in (0, 4, 8, 9)]
    assert [flops[0] - each for each in flops] == [0, 12 * 3 * 36 * 4, 0, 0]
