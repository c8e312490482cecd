"""Llama and its kin: training on every kind of grid equals the serial program's, by every method; and generation."""

import dataclasses
import functools

import pytest
import torch
from training_checks import (
    CORNERS,
    LENGTH,
    PLANES,
    by_messages,
    check,
    check_strategy,
    fitting,
    in_turn,
    logits_of,
    made,
    serial,
)  # fmt: skip

from hpctrain import Grid, RngKey
from hpctrain.models.llama import LlamaShape
from hpctrain.pipeline import schedule
from hpctrain.train.generate import generate

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(*CORNERS)]

# Nothing divides: 3 groups of 2 heads, width 15, inner width 21 and vocabulary 23 over 2, 4, 8 ranks. The frequencies
# turn 6.4, 2 and less than a time in the scaling's context: some stay, some are interpolated, some divided.
LLAMA = LlamaShape(
    layers=9, width=15, heads=6, context=8, vocabulary=23, kv_heads=3, ffn=21, head_width=6, rope_base=10.0,
    rope_scaling=(8.0, 0.7, 4.0, 40),
)  # fmt: skip
QWEN2 = dataclasses.replace(LLAMA, rope_scaling=(), qkv_bias=True, tied=False)
QWEN3 = dataclasses.replace(LLAMA, rope_scaling=(), qk_norm=True, norm_eps=1e-3)


@pytest.mark.parametrize(
    ("shape", "count", "clip"),
    [
        (LLAMA, 2, 1.0),
        (QWEN2, 6, 0.3),  # more microbatches than sequences; the clipping always bites
        (dataclasses.replace(QWEN3, dropout=0.3), 2, 1.0),
        (dataclasses.replace(QWEN3, kv_heads=1, width=5, vocabulary=3), 1, 0.0),  # ranks without heads, without words
        (dataclasses.replace(LLAMA, layers=8, width=16, heads=8, kv_heads=8, ffn=24, vocabulary=32), 2, 1.0),  # even
    ],
)
def test_equals_one_rank(world, case, shape, count, clip):
    """Losses, norms and weights of two steps."""
    for data, pipeline, tensor in in_turn(CORNERS, world.size, case):
        check(Grid(data, pipeline, tensor), fitting(shape, pipeline), count, clip)


@pytest.mark.ranks(2, 4, 8)
@pytest.mark.parametrize("algorithm", PLANES)
def test_algorithms(world, algorithm):
    shape = dataclasses.replace(QWEN3, dropout=0.3)
    for data, pipeline, tensor in PLANES[algorithm].get(world.size, []):
        check(Grid(data, pipeline, tensor), fitting(shape, pipeline), count=2, clip=1.0, algorithm=algorithm)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("name", ["interleaved", "zb-v", "dualpipev", "chimera", "terapipe"])
def test_schedules(world, name):
    """Stages with two replicas, split backwards, and slices of tokens, which turn by their place in the sequence."""
    grid = Grid(1, 2, world.size // 2)
    stages = schedule(name, 2, 2).graph.stages
    shape = dataclasses.replace(QWEN3, layers=stages + 1, rope_scaling=LLAMA.rope_scaling, dropout=0.3)
    slices = [3, LENGTH - 3] if name == "terapipe" else ()
    check(grid, shape, count=2, clip=1.0, pipeline=name, slices=slices)


METHODS = {1: [(1, 1, 1)], 2: [(2, 1, 1)], 4: [(2, 1, (1, 1, 2)), (2, 1, (2, 1, 1)), (2, 2, 1)], 8: [(2, 2, 2)]}


@pytest.mark.parametrize(("method", "recompute"), [("zero1", "none"), ("zero2", "attention"), ("zero3", "block")])
def test_zero_and_recompute(world, case, method, recompute):
    for data, pipeline, tensor in in_turn(METHODS, world.size, case):
        grid = Grid(data, pipeline, tensor)
        if recompute == "attention":
            by_messages(grid)
        shape = dataclasses.replace(fitting(QWEN3, pipeline), dropout=0.3)
        expected = serial(shape, 1.0)
        model = made(grid, shape, recompute=recompute)
        check_strategy(method, model, grid, shape, 2, expected)


PROMPT, COUNT, KNOWN = [3, 1], 8, 20  # longer than the context; the last three words of the vocabulary are padding


@functools.cache
def greedy():
    """The likeliest words by the reference, one after the other."""
    from mpi4py import MPI

    weights, ids = dict(made(Grid(comm=MPI.COMM_SELF), QWEN3).named_parameters()), list(PROMPT)
    with torch.no_grad():
        for _ in range(COUNT):
            logits = logits_of(QWEN3)(weights, torch.tensor([ids[-QWEN3.context :]]))
            ids.append(int(logits.reshape(-1, QWEN3.vocabulary)[-1, :KNOWN].argmax()))
    return ids[len(PROMPT) :]


def test_the_coldest_text_is_the_likeliest(world):
    for data, pipeline, tensor in in_turn(CORNERS, world.size, 0, of_8=2):
        grid = Grid(data, pipeline, tensor)
        assert generate(made(grid, QWEN3), grid, PROMPT, COUNT, KNOWN, RngKey(8), 1e-9) == greedy()
