"""Training whose sequences are cut over ring and Ulysses ranks equals the serial program, with everything else."""

import dataclasses

import pytest
import torch
from training_checks import UNEVEN, by_messages, check, check_strategy, fitting, in_turn, serial, train_on

from hpctrain import Grid, RngKey
from hpctrain.config import DataParallelConfig, load_config
from hpctrain.data_parallel import make
from hpctrain.layers import BatchNorm2d, Tokens
from hpctrain.layers.whole_parameters import whole_parameters
from hpctrain.models.gpt2 import GPT2
from hpctrain.models.llama import LlamaShape
from hpctrain.pipeline import schedule

pytestmark = pytest.mark.mpi

# ((replica, ring, ulysses), pipeline, tensor): every axis of a sequence beside every other axis.
GRIDS = {
    2: [((1, 1, 2), 1, 1), ((1, 2, 1), 1, 1)],
    4: [
        ((1, 2, 2), 1, 1), ((2, 2, 1), 1, 1), ((1, 1, 2), 2, 1), ((1, 2, 1), 1, (2, 1, 1)), ((1, 1, 2), 1, (1, 2, 1)),
        ((1, 2, 1), 1, (1, 1, 2)),
    ],
    8: [((2, 2, 1), 2, 1), ((1, 2, 2), 1, (1, 1, 2)), ((1, 1, 2), 1, (2, 2, 1)), ((1, 8, 1), 1, 1)],
}  # fmt: skip
GPT = dataclasses.replace(UNEVEN, dropout=0.3)
# One head of keys and values for 6 of queries, rotary positions, norms of heads
LLAMA = LlamaShape(
    layers=3, width=15, heads=6, context=8, vocabulary=23, kv_heads=1, ffn=21, head_width=4, rope_base=10.0,
    qk_norm=True, dropout=0.3,
)  # fmt: skip


@pytest.mark.ranks(*GRIDS)
@pytest.mark.parametrize("shape", [GPT, LLAMA])
def test_equals_one_rank(world, case, shape):
    """7 tokens, dropout, two microbatches, clipping."""
    for data, pipeline, tensor in in_turn(GRIDS, world.size, case, of_8=2):
        check(Grid(data, pipeline, tensor), fitting(shape, pipeline), count=2, clip=1.0)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("momentum", [0.9, None])
@pytest.mark.parametrize("shape", [GPT, LLAMA])
def test_weights_after_ten_steps(world, case, shape, momentum):
    """Within 1e-12 of the largest of their tensor, by SGD and by AdamW; but for GPT-2's biases of keys by AdamW. They
    change no probability, as each query adds one number to all its scores: their gradient is nothing but rounding, some
    1e-20, of which AdamW, that divides it by its like and 1e-8, makes some 1e-14 a step."""
    weights, losses, _ = serial(fitting(shape, 1), 1.0, steps=10, momentum=momentum)
    for data in in_turn({2: [(1, 2, 1), (1, 1, 2)], 4: [(1, 2, 2), (2, 2, 1)]}, world.size, case):
        grid = Grid(data)
        model, got, _ = train_on(grid, fitting(shape, 1), 2, 1.0, steps=10, momentum=momentum)
        assert got == pytest.approx(losses, rel=1e-12)
        for name, whole in whole_parameters(model, grid):
            if grid.rank == 0:
                wrong, limit = (whole - weights[name]).abs(), 1e-12 * weights[name].abs().max()
                if momentum is None and name.endswith("qkv.bias"):
                    _, keys, _ = wrong.view(shape.heads, 3, -1).unbind(1)
                    assert keys.max() < 1e-10
                    keys.zero_()
                assert wrong.max() <= limit, name


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(("shape", "length"), [(UNEVEN, 103), (LLAMA, 103), (UNEVEN, 3), (LLAMA, 2)])
def test_long_sequences_and_fewer_tokens_than_ranks(world, case, shape, length):
    shape = dataclasses.replace(shape, layers=1, context=length + 1)
    for data in in_turn({2: [(1, 2, 1), (1, 1, 2)], 4: [(1, 2, 2), (1, 4, 1)]}, world.size, case // 2):
        check(Grid(data), shape, count=1, clip=0.3)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(("balance", "way"), [("work", "windows"), ("none", "messages"), ("zigzag", "messages")])
def test_other_cuts_and_ways(world, balance, way):
    grid = Grid((1, world.size, 1))
    if way == "messages":
        by_messages(grid)
    check(grid, fitting(GPT, 1), count=2, clip=1.0, balance=balance)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", ["gpipe", "interleaved", "zb-h1", "zb-v", "chimera", "dualpipe", "dualpipev"])
def test_schedules(world, name):
    """With messages that wait for their receivers; half of the schedules on a ring, half with Ulysses ranks."""
    grid = Grid((1, 2, 1) if name < "h" else (1, 1, 2), 2)
    grid.transport.synchronous = True
    layers = schedule(name, 2, 4).graph.stages + 1
    check(grid, dataclasses.replace(GPT, layers=layers), count=4, clip=1.0, pipeline=name)


@pytest.mark.parametrize(
    ("name", "data", "tensor"),
    [
        pytest.param(*case, marks=pytest.mark.ranks(ranks))
        for ranks, *case in [
            (4, "megatron", (1, 1, 2), (2, 1, 1)), (4, "summa", (1, 2, 1), (2, 1, 1)),
            (4, "summa", (1, 1, 2), (1, 2, 1)), (4, "two_half_d", (1, 2, 1), (1, 1, 2)),
            (8, "cannon", (1, 1, 2), (2, 2, 1)), (8, "cannon", (1, 2, 1), (2, 2, 1)),
        ]
    ],
)  # fmt: skip
def test_tensor_algorithms(world, name, data, tensor):
    check(Grid(data, 1, tensor), fitting(GPT, 1), count=2, clip=1.0, algorithm=name)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("way", ["windows", "messages"])
@pytest.mark.parametrize("method", ["zero1", "zero2", "zero3"])
def test_zero(world, method, way):
    shape = fitting(GPT, 1)
    expected = serial(shape, 1.0)
    for data in {2: [(1, 2, 1), (1, 1, 2)], 4: [(1, 2, 2) if way == "windows" else (2, 2, 1)]}[world.size]:
        grid = Grid(data)
        if way == "messages":
            by_messages(grid)
        model = GPT2(grid, shape, key=RngKey(3), dtype=torch.float64)
        check_strategy(method, model, grid, shape, 3, expected)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("recompute", ["attention", "block"])
def test_recompute(world, recompute):
    """The same bits, with dropout."""
    for data, pipeline, tensor in {2: [((1, 1, 2), 1, 1)], 4: [((1, 2, 1), 2, 1)]}[world.size]:
        shape = fitting(LLAMA, pipeline)
        kept, again = (
            train_on(Grid(data, pipeline, tensor), shape, 2, 1.0, recompute=how)[1:] for how in ("none", recompute)
        )
        assert kept == again


@pytest.mark.ranks(2)
def test_what_needs_whole_sequences_is_refused(world):
    grid = Grid((1, 2, 1))
    for what, refused in {
        "BatchNorm2d": lambda: BatchNorm2d(grid, 4),
        "data_parallel.method = parameter_server": lambda: make(
            DataParallelConfig("parameter_server"), torch.nn.ParameterList(), grid, None
        ),
        "token slices": lambda: Tokens.of(grid, 2, 8, part=slice(0, 4)),
    }.items():
        with pytest.raises(ValueError, match=what):
            refused()
    for option in ("pipeline.schedule=terapipe", "data_parallel.method=parameter_server"):
        with pytest.raises(
            ValueError, match=option.replace("=", " = ") + ".* needs whole sequences.*use grid.data = 2"
        ):
            load_config(overrides=["grid.data=[1, 1, 2]", option])
