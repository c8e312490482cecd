"""The bytes that the ledger counts in one training step equal the formula, on every grid whose sizes divide."""

import dataclasses
import math

import pytest
import torch

from hpctrain import Grid, Key
from hpctrain.algorithms import DEFAULT_OVERLAP, OVERLAPS
from hpctrain.config import Replicas
from hpctrain.grid import all_grids
from hpctrain.layers import Tokens, algorithm_of
from hpctrain.models.gpt2 import GPT2, GPT2Shape
from hpctrain.pipeline import one_f_one_b, schedule
from hpctrain.plan import step_traffic
from hpctrain.replicas import make
from hpctrain.train.batches import Microbatch
from hpctrain.train.optimizer import adamw
from hpctrain.train.trainer import Trainer

EVEN = GPT2Shape(layers=8, width=32, heads=8, context=8, vocabulary=64)


def counted(grid, shape, batch, order, algorithm="agarwal", overlap=OVERLAPS, slices=(), method="ddp"):
    """One training step's ledger: bytes received and sent, {axis: bytes}."""
    made = algorithm_of(grid, algorithm, overlap)
    order = one_f_one_b(grid.pipeline.size, order) if isinstance(order, int) else order
    count = order.microbatches
    model = GPT2(grid, shape, placement=order.placement, algorithm=made, key=Key(0), dtype=torch.float32)
    optimizer = adamw(model.parameters(), 0.1)
    replicas = make(Replicas(method), model, grid, optimizer)
    trainer = Trainer(model, grid, optimizer, order, slices=slices, replicas=replicas)
    each = batch // (grid.data.size * count)
    first = grid.data.rank * each * count
    tokens = [Tokens.of(grid, each, shape.context, first + m * each, 0, algorithm) for m in range(count)]
    ids = [torch.zeros(t.sequences * shape.context, dtype=torch.int64) for t in tokens]
    targets = [torch.zeros(len(t.inner) * shape.context, dtype=torch.int64) for t in tokens]
    scale = 1 / (batch * shape.context)
    grid.wire.traffic.clear()
    trainer.step([Microbatch(*parts, scale) for parts in zip(tokens, ids, targets)])
    tables = []
    for what in ("received", "sent"):
        table = dict.fromkeys(("data", "pipeline", "tensor"), 0)
        for (axis, _), cell in grid.wire.traffic.table().items():
            table[axis if axis in table else "tensor"] += cell[what]
        tables.append(table)
    return tables


@pytest.mark.mpi
@pytest.mark.parametrize("tied", [True, False])
def test_ledger_equals_formula(world, tied):
    if world.size not in (1, 2, 4, 8):
        pytest.skip("sizes divide on 1, 2, 4 and 8 ranks")
    for data, pipeline, tensor in all_grids(world.size):
        grid = Grid(data, pipeline, tensor)
        shape = dataclasses.replace(EVEN, tied=tied, layers=max(2, pipeline))
        received, sent = counted(grid, shape, batch=16, order=2)
        expected = step_traffic(shape, grid.shape, 16, 2, rank=grid.pipeline.rank)
        assert received == pytest.approx(expected, abs=0), grid.shape
        assert {a: b for a, b in sent.items() if a != "pipeline"} == {
            a: b for a, b in received.items() if a != "pipeline"
        }
        assert world.allreduce(sent["pipeline"]) == world.allreduce(received["pipeline"])


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("overlap", [(), *((name,) for name in OVERLAPS), OVERLAPS])
def test_ledger_equals_formula_with_overlaps(world, overlap):
    if world.size not in (2, 4, 8):
        pytest.skip("sizes divide on 2, 4 and 8 ranks")
    for data, pipeline, tensor in all_grids(world.size):
        if tensor[2] > 1:
            grid = Grid(data, pipeline, tensor)
            shape = dataclasses.replace(EVEN, layers=max(2, pipeline))
            received, _ = counted(grid, shape, batch=16, order=2, overlap=overlap)
            expected = step_traffic(shape, grid.shape, 16, 2, rank=grid.pipeline.rank, overlap=overlap)
            assert received == pytest.approx(expected, abs=0), grid.shape


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("way", ["windows", "messages"])
@pytest.mark.parametrize("method", ["zero1", "zero2", "zero3"])
def test_ledger_equals_formula_with_zero(world, method, way):
    places = {2: [(2, 1, 1)], 4: [(4, 1, 1), (2, 2, 1), (2, 1, (1, 1, 2)), (2, 1, (2, 1, 1))], 8: [(2, 2, (1, 1, 2))]}
    for data, pipeline, tensor in places.get(world.size, []):
        grid = Grid(data, pipeline, tensor)
        grid.data.one_node &= way == "windows"
        shape = dataclasses.replace(EVEN, layers=2)
        received, sent = counted(grid, shape, 16, 2, overlap=DEFAULT_OVERLAP, method=method)
        expected = step_traffic(shape, grid.shape, 16, 2, rank=grid.pipeline.rank, method=method)
        if way == "messages" and method == "zero3":  # before each of two microbatches' layers, and the end of the step
            expected["data"] += 8 * (data - 1) * (2 * 2 * (shape.layers // pipeline + 1) + 1)
        assert received == pytest.approx(expected, abs=0), grid.shape
        assert sent["data"] == received["data"]


PLANES = [
    ("cannon", (1, 1, (2, 2, 1))), ("cannon", (1, 2, (2, 2, 1))), ("cannon", (2, 1, (2, 2, 1))),
    ("summa", (1, 1, (2, 1, 1))), ("summa", (1, 1, (1, 2, 1))), ("summa", (1, 1, (4, 1, 1))),
    ("summa", (1, 1, (2, 4, 1))), ("summa", (1, 1, (4, 2, 1))),
    ("two_half_d", (1, 1, (1, 1, 2))), ("two_half_d", (1, 2, (1, 1, 2))), ("two_half_d", (1, 1, (2, 2, 2))),
]  # fmt: skip


@pytest.mark.mpi
@pytest.mark.parametrize(("algorithm", "place"), PLANES)
def test_ledger_equals_formula_on_planes(world, algorithm, place):
    data, pipeline, tensor = place
    if data * pipeline * math.prod(tensor) != world.size:
        pytest.skip(f"{algorithm} on {place} takes another number of ranks")
    grid = Grid(data, pipeline, tensor)
    shape = dataclasses.replace(EVEN, layers=2)
    received, _ = counted(grid, shape, batch=16, order=2, algorithm=algorithm)
    expected = step_traffic(shape, grid.shape, 16, 2, rank=grid.pipeline.rank, algorithm=algorithm)
    assert received == pytest.approx(expected, abs=0)


SCHEDULES = ("gpipe", "interleaved", "zb-h1", "zb-v", "chimera", "dualpipe", "dualpipev", "terapipe", "pipedream")
STAGED = {
    1: [(1, 1, (1, 1, 1))],
    2: [(1, 2, (1, 1, 1)), (1, 1, (1, 1, 2)), (1, 1, (2, 1, 1))],
    4: [(1, 2, (2, 1, 1)), (2, 2, (1, 1, 1)), (1, 2, (1, 1, 2)), (1, 4, (1, 1, 1))],
}


@pytest.mark.mpi
@pytest.mark.parametrize("name", SCHEDULES)
def test_ledger_equals_formula_with_every_schedule(world, name):
    for data, pipeline, tensor in STAGED.get(world.size, []):
        if name in ("chimera", "dualpipe") and pipeline % 2:
            continue
        grid = Grid(data, pipeline, tensor)
        order = schedule(name, pipeline, 4)
        shape = dataclasses.replace(EVEN, tied=name != "pipedream", layers=max(2, order.graph.stages))
        slices = [shape.context // order.slices] * order.slices if name == "terapipe" else ()
        received, _ = counted(grid, shape, batch=16, order=order, overlap=DEFAULT_OVERLAP, slices=slices)
        expected = step_traffic(shape, grid.shape, 16, order, rank=grid.pipeline.rank)
        assert received == pytest.approx(expected, abs=0), (grid.shape, grid.pipeline.rank)


def test_formula_by_hand():
    """A model small enough to count: 1 layer, width 4, vocabulary 6, context 2, batch 2, one microbatch, 4 bytes."""
    shape = GPT2Shape(layers=1, width=4, heads=2, context=2, vocabulary=6)
    sizes = dict.fromkeys(("data", "pipeline", "x", "y", "z"), 1)
    assert step_traffic(shape, sizes, 2, 1) == {"data": 0, "pipeline": 0, "tensor": 0}

    # data 2: half of twice all parameters, and of the loss: 12·16 weights, 6·4 + 2·4 tables, 9·4 biases, 6·4 norms
    parameters = 192 + 32 + 36 + 24
    assert step_traffic(shape, {**sizes, "data": 2}, 2, 1)["data"] == 4 * parameters + 8

    # z 2, 2 microbatches: half of every weight is gathered forward and back, half of the tables gathered and summed, in
    # each; half of the weights' gradients is received once a step, or in each. Then vectors, summed over z.
    weights, tables, vectors = 192 + 24, 24 + 8, 36 + 24
    words = 2 * (weights + tables) + weights / 2 + vectors
    once, each = (step_traffic(shape, {**sizes, "z": 2}, 4, 2, overlap=names)["tensor"] for names in (OVERLAPS, ()))
    assert (once, each) == (4 * words + 16, 4 * (words + weights / 2) + 16)

    # x 2, 4 rows: qkv and up gather half of 4×4 three times forward and back (x, again x, dx); proj and down scatter
    # and gather half of 4×4 twice; the head as qkv; embedding scatters and gathers half of 4×4; the loss gathers 2·4
    # numbers of the other rank. Vectors repeated over x: norms 6·4, biases of proj and down 2·4.
    half = 8
    words = 2 * 3 * half + 2 * 2 * half + 3 * half + 2 * half + 8 + (24 + 8)
    assert step_traffic(shape, {**sizes, "x": 2}, 2, 1)["tensor"] == 4 * words + 16


@pytest.mark.mpi
def test_weights_are_gathered_ahead_by_one_alone(world):
    grid = Grid(data=world.size)
    with pytest.raises(ValueError, match="take prefetch out of tensor.overlap"):
        counted(grid, EVEN, 8 * world.size, 1, overlap=["prefetch"], method="zero3")
