"""Keys and values that ranks share while a text is written: the logits of one rank that sees all, token by token."""

import dataclasses

import pytest
import torch
from test_llama import QWEN3
from test_sequence_training import GRIDS, LLAMA
from training_checks import UNEVEN, fitting, logits_of, made

from hpctrain import Grid
from hpctrain.layers.context.sharded_kv_cache import ShardedKVCache

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 4, 8)]

CONTEXT, PROMPT = 19, 6
SHAPES = {
    "gpt2": UNEVEN,
    "llama": QWEN3,
    "one key head, narrow window": dataclasses.replace(LLAMA, window=3),
    "wide window": dataclasses.replace(QWEN3, window=11),
}
IDS = torch.arange(CONTEXT) * 7 % 23


def written(grid, shape, prompt):
    """The model, its cache, and logits of the last position after the prompt and after each token that follows."""
    model, cache, found = made(grid, shape).eval(), ShardedKVCache(grid.sequence), []
    with torch.no_grad():
        for stop in range(prompt, CONTEXT + 1):
            part = slice(0, stop) if stop == prompt else slice(stop - 1, stop)
            tokens = model.tokens(1, stop).part(part, cache)
            ids = IDS[tokens.positions()].repeat(tokens.sequences)
            found.append(model.last_logits(model(ids, tokens), tokens))
    return model, cache, torch.stack(found)


@pytest.mark.parametrize("case", SHAPES)
def test_logits_are_those_of_one_rank(world, case):
    shape = dataclasses.replace(fitting(SHAPES[case], 1), context=CONTEXT, dropout=0.0)
    grids, turn = [place for place in GRIDS[world.size] if place[1] == 1], list(SHAPES).index(case)
    for data, _, tensor in grids if world.size == 2 else grids[turn % 3 :: 3]:
        for prompt in (PROMPT, 1) if world.size == 2 else [(PROMPT, 1)[turn % 2]]:
            grid = Grid(data, 1, tensor)
            _, cache, found = written(grid, shape, prompt)
            expected = everything(world, shape)[prompt - 1 :]
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
            assert len({found.numpy().tobytes() for found in world.allgather(found)}) == 1
            check_spread(grid, cache)


def everything(world, shape):
    """Logits of every position by the reference, which sees all at once."""
    from mpi4py import MPI

    weights = dict(made(Grid(comm=MPI.COMM_SELF), shape).named_parameters())
    with torch.no_grad():
        return logits_of(shape)(weights, IDS[None])[0]


def check_spread(grid, cache):
    """Every key is on one rank, and no rank has many more than another."""
    for seen in cache._seen.values():
        assert seen.k.shape[2] == seen.v.shape[2] == len(seen.positions) == seen.counts[grid.sequence.rank]
        everywhere = grid.sequence.comm.allgather(seen.positions)
        assert sorted(sum(everywhere, [])) == list(range(CONTEXT))
        assert max(seen.counts) - min(seen.counts) <= 1


def test_a_token_moves_an_output_a_layer(world):
    """And an lse for each head, of every other rank."""
    grid, shape = Grid((1, world.size, 1)), dataclasses.replace(fitting(UNEVEN, 1), context=CONTEXT)
    model, cache, _ = written(grid, shape, CONTEXT - 1)
    grid.transport.traffic.clear()
    tokens = model.tokens(1, CONTEXT + 1).part(slice(CONTEXT, CONTEXT + 1), cache)
    with torch.no_grad():
        model.blocks["0"].attention(torch.ones(1, shape.width, dtype=torch.float64), tokens)
    moved = (world.size - 1) * (shape.width + shape.heads) * 8
    assert grid.transport.traffic.total("received", ("sequence",)) == moved
    assert grid.transport.traffic.total("received") == moved


def test_token_slices_keep_no_spread_keys(world):
    with pytest.raises(ValueError, match="token slices and sequence axes both cut sequences"):
        made(Grid((1, world.size, 1)), UNEVEN).tokens(1, 4).part(slice(0, 2), None)
