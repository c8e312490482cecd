"""The bytes that the ledger counts in one training step equal the formula, on every grid whose sizes divide."""

import dataclasses
import math

import pytest
from traffic_checks import EVEN, counted
from training_checks import in_turn

from hpctrain import Grid, models
from hpctrain.choices import DEFAULT_OVERLAP, OVERLAPS
from hpctrain.config import PrecisionConfig
from hpctrain.grid_shape import all_grids, grid_shape
from hpctrain.models.gpt2 import GPT2Shape
from hpctrain.models.llama import LlamaShape
from hpctrain.models.mixtral import MixtralShape
from hpctrain.pipeline import schedule
from hpctrain.plan import step_traffic

LLAMA = LlamaShape(layers=8, width=32, heads=16, context=8, vocabulary=64, kv_heads=8, ffn=48, head_width=4)
QWEN2, QWEN3 = dataclasses.replace(LLAMA, qkv_bias=True, tied=False), dataclasses.replace(LLAMA, qk_norm=True)


# Each token goes to all experts, so that the load is even.
MIXTRAL = MixtralShape(
    layers=3, width=32, heads=16, context=8, vocabulary=64, kv_heads=8, ffn=48, head_width=4, qk_norm=True,
    dense_layers=1, experts=4, top_k=4, expert_ffn=24, aux_loss=0.1,
)  # fmt: skip
DEEPSEEK = dataclasses.replace(MIXTRAL, router="sigmoid", shared_experts=2, aux_loss=0.0, tied=False)


def grids(ranks, turn, turns):
    """All of them, of four ranks in the first of a test's turns, and some in each of the others; of 8 ranks those that
    split three axes, as the others' shapes of grid occur on 4: some in each turn."""
    if ranks < 8:
        return all_grids(ranks)[turn - 1 :: turns - 1] if turn and ranks == 4 else all_grids(ranks)
    return [grid for grid in all_grids(ranks) if [*grid[:2], *grid[2]].count(2) == 3][turn::turns]


def costs(shape):
    kinds = {GPT2Shape: "gpt2", LlamaShape: "llama", MixtralShape: "mixtral"}
    return models.get(kinds[type(shape)]).costs(shape)


@pytest.mark.mpi
@pytest.mark.ranks(1, 2, 4, 8)
@pytest.mark.parametrize("turn", range(4))
def test_ledger_equals_formula(world, turn):
    shape = (EVEN, dataclasses.replace(EVEN, tied=False), QWEN2, QWEN3)[turn]
    for data, pipeline, tensor in grids(world.size, turn, 4):
        grid = Grid(data, pipeline, tensor)
        shape = dataclasses.replace(shape, layers=max(2, pipeline))
        received, sent = counted(grid, shape, batch=16, order=2)
        expected = step_traffic(costs(shape), grid.shape, 16, 2, rank=grid.pipeline.rank)
        assert received == pytest.approx(expected, abs=0), grid.shape
        assert {a: b for a, b in sent.items() if a != "pipeline"} == {
            a: b for a, b in received.items() if a != "pipeline"
        }
        assert world.allreduce(sent["pipeline"]) == world.allreduce(received["pipeline"])


@pytest.mark.mpi
@pytest.mark.ranks(1, 2, 4, 8)
@pytest.mark.parametrize("turn", range(3))
def test_ledger_equals_formula_of_experts(world, turn):
    shape = (MIXTRAL, dataclasses.replace(MIXTRAL, aux_scope="step"), DEEPSEEK)[turn]
    for number, (data, pipeline, tensor) in enumerate(grids(world.size, turn, 3)):
        spread = min(4, world.size // pipeline)
        for expert in {1, spread} if world.size < 4 or (turn == 0 and number % 2) else [spread]:
            parts = 2 if shape.router == "sigmoid" and expert > 1 else 1
            with Grid(data, pipeline, tensor, expert=expert, expert_tensor=parts) as grid:
                shape = dataclasses.replace(shape, layers=max(3, pipeline + pipeline % 2))
                order = schedule("gpipe" if shape.aux_scope == "step" else "1f1b", pipeline, 2)
                received, sent = counted(grid, shape, batch=16, order=order)
                rank = grid.pipeline.rank
                how = {"expert": expert, "expert_tensor": parts}
                expected = step_traffic(costs(shape), grid.shape, 16, order, rank=rank, **how)
                assert received == pytest.approx(expected, abs=0), (grid.shape, expert)
                assert (received["expert"] > 0) == (expert > 1)


@pytest.mark.mpi
@pytest.mark.ranks(2, 4, 8)
@pytest.mark.parametrize("turn", range(2 + len(OVERLAPS)))
def test_ledger_equals_formula_with_overlaps(world, turn):
    overlap = ((), *((name,) for name in OVERLAPS), OVERLAPS)[turn]
    for data, pipeline, tensor in grids(world.size, turn % 2, 2):
        if tensor[2] > 1:
            grid = Grid(data, pipeline, tensor)
            shape = dataclasses.replace(EVEN, layers=max(2, pipeline))
            received, _ = counted(grid, shape, batch=16, order=2, overlap=overlap)
            expected = step_traffic(costs(shape), grid.shape, 16, 2, rank=grid.pipeline.rank, overlap=overlap)
            assert received == pytest.approx(expected, abs=0), grid.shape


BY_ZERO = {2: [(2, 1, 1)], 4: [(4, 1, 1), (2, 2, 1), (2, 1, (1, 1, 2)), (2, 1, (2, 1, 1))], 8: [(2, 2, (1, 1, 2))]}


@pytest.mark.mpi
@pytest.mark.ranks(*BY_ZERO)
@pytest.mark.parametrize("way", ["windows", "messages"])
@pytest.mark.parametrize("method", ["zero1", "zero2", "zero3"])
def test_ledger_equals_formula_with_zero(world, case, method, way):
    for data, pipeline, tensor in in_turn(BY_ZERO, world.size, case):
        grid = Grid(data, pipeline, tensor)
        grid.data.one_node &= way == "windows"
        shape = dataclasses.replace(EVEN, layers=2)
        received, sent = counted(grid, shape, 16, 2, overlap=DEFAULT_OVERLAP, method=method)
        expected = step_traffic(costs(shape), grid.shape, 16, 2, rank=grid.pipeline.rank, method=method)
        if way == "messages" and method == "zero3":  # before each of two microbatches' layers, and the end of the step
            expected["data"] += 8 * (data - 1) * (2 * 2 * (shape.layers // pipeline + 1) + 1)
        assert received == pytest.approx(expected, abs=0), grid.shape
        assert sent["data"] == received["data"]


AGAIN = {
    2: [*((grid, "agarwal") for grid in all_grids(2, sequence=True)), ((1, 1, (2, 1, 1)), "summa"),
        ((1, 1, (1, 1, 2)), "two_half_d")],
    4: [((1, 1, (2, 2, 1)), "cannon"), ((1, 1, (2, 2, 1)), "agarwal"), ((1, 2, (1, 2, 1)), "agarwal"),
        (((1, 2, 1), 1, (1, 2, 1)), "agarwal"), ((2, 1, (1, 1, 2)), "agarwal")],
}  # fmt: skip


@pytest.mark.mpi
@pytest.mark.ranks(*AGAIN)
@pytest.mark.parametrize("recompute", ["attention", "block"])
@pytest.mark.parametrize("shape", [EVEN, QWEN3])
def test_ledger_equals_formula_with_recomputation(world, recompute, shape):
    for place, algorithm in AGAIN[world.size]:
        grid, shape = Grid(*place), dataclasses.replace(shape, layers=2)
        received, _ = counted(grid, shape, 16, 2, algorithm, DEFAULT_OVERLAP, recompute=recompute)
        expected = step_traffic(costs(shape), grid.shape, 16, 2, 4, grid.pipeline.rank, algorithm, recompute=recompute)
        assert received == pytest.approx(expected, abs=0), (grid.shape, algorithm)


@pytest.mark.mpi
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("shape", [MIXTRAL, DEEPSEEK])
def test_ledger_equals_formula_with_experts_recomputed(world, shape):
    """Which experts a token goes to is decided once."""
    for box in ((1, 1, 1), (2, 1, 1), (1, 2, 1)):
        with Grid(world.size // math.prod(box), 1, box, expert=world.size) as grid:
            received, _ = counted(grid, shape, 16, 2, overlap=DEFAULT_OVERLAP, recompute="block")
            expected = step_traffic(costs(shape), grid.shape, 16, 2, expert=world.size, recompute="block")
        assert received == pytest.approx(expected, abs=0), grid.shape


SPLIT = {
    2: [((1, 2, 1), "ddp", "zb-h1"), ((1, 2, 1), "ddp", "zb-v"), ((1, 1, (2, 1, 1)), "ddp", "zb-h1"),
        ((1, 1, (1, 1, 2)), "ddp", "zb-h1"), ((2, 1, 1), "zero2", "1f1b"), ((2, 1, 1), "zero3", "1f1b")],
    4: [((1, 2, (1, 2, 1)), "ddp", "zb-v"), ((2, 1, (1, 1, 2)), "zero3", "1f1b")],
}  # fmt: skip


@pytest.mark.mpi
@pytest.mark.ranks(*SPLIT)
def test_ledger_equals_formula_with_blocks_recomputed_once(world):
    """Whenever weights' gradients are computed; and weights are gathered no more often."""
    for place, method, name in SPLIT[world.size]:
        grid, shape = Grid(*place), dataclasses.replace(EVEN, layers=4)
        order = schedule(name, grid.pipeline.size, 2)
        received, _ = counted(grid, shape, 16, order, overlap=DEFAULT_OVERLAP, method=method, recompute="block")
        expected = step_traffic(
            costs(shape), grid.shape, 16, order, rank=grid.pipeline.rank, method=method, recompute="block"
        )
        assert received == pytest.approx(expected, abs=0), (grid.shape, method, name)


HALVES = {
    2: [*((grid, "agarwal", "ddp") for grid in all_grids(2)), ((2, 1, 1), "agarwal", "zero3"), ((2, 1, 1), "agarwal",
        "zero1"), (((1, 2, 1), 1, 1), "agarwal", "ddp"), (((1, 1, 2), 1, 1), "agarwal", "zero1")],
    4: [((1, 1, (2, 2, 1)), "cannon", "ddp"), ((2, 2, 1), "agarwal", "zero2"), ((2, 1, (1, 1, 2)), "agarwal", "zero1"),
        ((1, 1, (2, 2, 1)), "agarwal", "ddp"), (((1, 2, 2), 1, 1), "agarwal", "ddp")],
}  # fmt: skip


@pytest.mark.mpi
@pytest.mark.ranks(*HALVES)
@pytest.mark.parametrize(("reduce", "comm_dtype"), [("fp32", "fp32"), ("compute", "fp32"), ("fp32", "bf16")])
def test_ledger_equals_formula_in_16_bits(world, case, reduce, comm_dtype):
    """Weights and activations have 2 bytes; gradients 4 or 2, which travel over data in 4 or 2; statistics always 4."""
    precision = PrecisionConfig("bf16", reduce=reduce, comm_dtype=comm_dtype)
    bytes_of = 2 if reduce == "compute" else 4
    for (data, pipeline, tensor), algorithm, method in in_turn(HALVES, world.size, case):
        for shape in (dataclasses.replace(EVEN, layers=2), dataclasses.replace(QWEN3, layers=2)):
            with Grid(data, pipeline, tensor) as grid:
                received, _ = counted(grid, shape, 16, 2, algorithm, DEFAULT_OVERLAP, (), method, precision)
                expected = step_traffic(
                    costs(shape), grid.shape, 16, 2, 2, grid.pipeline.rank, algorithm, method=method, reduce=bytes_of,
                    comm=2 if comm_dtype == "bf16" else bytes_of,
                )  # fmt: skip
            assert received == pytest.approx(expected, abs=0), (grid.shape, method)


SHARED = {
    2: [((1, 2, 1), 1, 1), ((1, 1, 2), 1, 1)],
    4: [((1, 2, 2), 1, 1), ((1, 4, 1), 1, 1), ((1, 1, 2), 1, (2, 1, 1)), ((1, 2, 1), 2, 1)],
}  # fmt: skip


@pytest.mark.mpi
@pytest.mark.ranks(*SHARED)
@pytest.mark.parametrize("shape", [EVEN, LLAMA, dataclasses.replace(LLAMA, kv_heads=2)])
def test_ledger_equals_formula_where_ranks_share_sequences(world, case, shape):
    for data, pipeline, tensor in in_turn(SHARED, world.size, case):
        grid, shape = Grid(data, pipeline, tensor), dataclasses.replace(shape, layers=2)
        received, _ = counted(grid, shape, batch=16, order=2)
        expected = step_traffic(costs(shape), grid.shape, 16, 2, rank=grid.pipeline.rank)
        assert received == pytest.approx(expected, abs=0), grid.shape
        assert received["sequence"] > 0


PLANES = [
    ("cannon", (1, 1, (2, 2, 1))), ("cannon", (1, 2, (2, 2, 1))), ("cannon", (2, 1, (2, 2, 1))),
    ("summa", (1, 1, (2, 1, 1))), ("summa", (1, 1, (1, 2, 1))), ("summa", (1, 1, (4, 1, 1))),
    ("summa", (1, 1, (2, 4, 1))), ("summa", (1, 1, (4, 2, 1))),
    ("two_half_d", (1, 1, (1, 1, 2))), ("two_half_d", (1, 2, (1, 1, 2))), ("two_half_d", (1, 1, (2, 2, 2))),
]  # fmt: skip


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("algorithm", "place"),
    [pytest.param(*case, marks=pytest.mark.ranks(case[1][0] * case[1][1] * math.prod(case[1][2]))) for case in PLANES],
)
@pytest.mark.parametrize("shape", [EVEN, QWEN2, QWEN3])
def test_ledger_equals_formula_on_planes(world, algorithm, place, shape):
    grid = Grid(*place)
    shape = dataclasses.replace(shape, layers=2)
    received, _ = counted(grid, shape, batch=16, order=2, algorithm=algorithm)
    expected = step_traffic(costs(shape), grid.shape, 16, 2, rank=grid.pipeline.rank, algorithm=algorithm)
    assert received == pytest.approx(expected, abs=0)


SCHEDULES = ("gpipe", "interleaved", "zb-h1", "zb-v", "chimera", "dualpipe", "dualpipev", "terapipe", "pipedream")
STAGED = {
    1: [(1, 1, (1, 1, 1))],
    2: [(1, 2, (1, 1, 1)), (1, 1, (1, 1, 2)), (1, 1, (2, 1, 1))],
    4: [(1, 2, (2, 1, 1)), (2, 2, (1, 1, 1)), (1, 2, (1, 1, 2)), (1, 4, (1, 1, 1))],
}


@pytest.mark.mpi
@pytest.mark.ranks(*STAGED)
@pytest.mark.parametrize("name", SCHEDULES)
def test_ledger_equals_formula_with_every_schedule(world, case, name):
    for data, pipeline, tensor in in_turn(STAGED, world.size, case):
        if name in ("chimera", "dualpipe") and pipeline % 2:
            continue
        grid = Grid(data, pipeline, tensor)
        order = schedule(name, pipeline, 4)
        shape = dataclasses.replace(EVEN, tied=name != "pipedream", layers=max(2, order.graph.stages))
        slices = [shape.context // order.slices] * order.slices if name == "terapipe" else ()
        received, _ = counted(grid, shape, batch=16, order=order, overlap=DEFAULT_OVERLAP, slices=slices)
        expected = step_traffic(costs(shape), grid.shape, 16, order, rank=grid.pipeline.rank)
        assert received == pytest.approx(expected, abs=0), (grid.shape, grid.pipeline.rank)


@pytest.mark.mpi
@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", ["chimera", "dualpipe"])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_ledger_equals_formula_where_more_go_one_way(world, name, microbatches):
    """Than the other: a rank has a stage of each, of one microbatch without any work in the one."""
    order, shape = schedule(name, 2, microbatches), dataclasses.replace(EVEN, layers=2)
    for tensor in ((2, 1, 1), (1, 1, 2)):
        grid = Grid(1, 2, tensor)
        received, _ = counted(grid, shape, 4 * microbatches, order, overlap=DEFAULT_OVERLAP)
        expected = step_traffic(costs(shape), grid.shape, 4 * microbatches, order, rank=grid.pipeline.rank)
        assert received == pytest.approx(expected, abs=0), grid.shape


def test_formula_by_hand():
    """A model small enough to count: 1 layer, width 4, vocabulary 6, context 2, batch 2, one microbatch, 4 bytes."""
    shape = GPT2Shape(layers=1, width=4, heads=2, context=2, vocabulary=6)
    sizes = grid_shape(1, 1, 1)
    assert step_traffic(costs(shape), sizes, 2, 1) == {
        "data": 0,
        "sequence": 0,
        "expert": 0,
        "pipeline": 0,
        "tensor": 0,
    }

    # data 2: half of twice all parameters, and of the loss: 12·16 weights, 6·4 + 2·4 tables, 9·4 biases, 6·4 norms
    parameters = 192 + 32 + 36 + 24
    assert step_traffic(costs(shape), {**sizes, "replica": 2}, 2, 1)["data"] == 4 * parameters + 8

    # z 2, 2 microbatches: half of every weight is gathered forward and back, half of the tables gathered and summed, in
    # each; half of the weights' gradients is received once a step, or in each. Then vectors, summed over z.
    weights, tables, vectors = 192 + 24, 24 + 8, 36 + 24
    elements = 2 * (weights + tables) + weights / 2 + vectors
    once, each = (
        step_traffic(costs(shape), {**sizes, "z": 2}, 4, 2, overlap=names)["tensor"] for names in (OVERLAPS, ())
    )
    assert (once, each) == (4 * elements + 16, 4 * (elements + weights / 2) + 16)

    # x 2, 4 rows: qkv and up gather half of 4×4 three times forward and back (x, again x, dx); proj and down scatter
    # and gather half of 4×4 twice; the head as qkv; embedding scatters and gathers half of 4×4; the loss gathers 2·4
    # numbers of the other rank. Vectors repeated over x: norms 6·4, biases of proj and down 2·4.
    half = 8
    elements = 2 * 3 * half + 2 * 2 * half + 3 * half + 2 * half + 8 + (24 + 8)
    assert step_traffic(costs(shape), {**sizes, "x": 2}, 2, 1)["tensor"] == 4 * elements + 16
