"""Stages whose ranks are arranged in different tensor boxes: training equals the serial program."""

import dataclasses
import json

import pytest
import torch
from test_mixtral import MIXTRAL
from traffic_checks import EVEN, counted
from training_checks import UNEVEN, batches, check, fitting, made, microbatches

from hpctrain import Grid, checkpoint
from hpctrain.config import load_config
from hpctrain.layers.whole_parameters import whole_parameters
from hpctrain.pipeline import schedule
from hpctrain.plan.job import read
from hpctrain.plan.prediction import received_by
from hpctrain.train.optimizer import make_optimizer
from hpctrain.train.trainer import Trainer

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(4, 8)]

BOXES = {
    4: [(1, [(2, 1, 1), (1, 2, 1)]), (1, [(1, 1, 2), (2, 1, 1)])],
    8: [
        (1, [(4, 1, 1), (2, 1, 2)]),
        ((1, 1, 2), [(1, 2, 1), (1, 1, 2)]),
        (1, [(2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 2, 1)]),
    ],
}  # fmt: skip
UNTIED = dataclasses.replace(UNEVEN, tied=False, dropout=0.3)


def grids(world):
    for data, boxes in BOXES[world.size]:
        yield Grid(data, len(boxes), boxes[0], boxes=boxes)


@pytest.mark.parametrize(
    ("name", "count"),
    [pytest.param("1f1b", 3, marks=pytest.mark.ranks(4, 8)), pytest.param("zb-v", 2, marks=pytest.mark.ranks(4))],
)
def test_equals_serial(world, name, count):
    """Three steps with dropout, clipping and uneven microbatches, some of them without a sequence."""
    for grid in grids(world):
        layers = schedule(name, grid.pipeline.size, count).graph.stages + 1
        shape = dataclasses.replace(UNTIED, layers=layers, dropout=0.0 if grid.sequence.size > 1 else UNTIED.dropout)
        check(grid, shape, count, 1.0, pipeline=name)


@pytest.mark.ranks(4)
def test_planes_slices_and_tables_of_both_ends(world):
    """SUMMA's rows are cut at sequences; token slices, by blocking messages; a tied table on the same box."""
    summa = Grid(1, 2, 2, boxes=[(2, 1, 1), (1, 2, 1)])
    check(summa, fitting(UNTIED, 2), 2, 1.0, algorithm="summa")
    summa.transport.synchronous = True
    check(summa, fitting(UNTIED, 2), 2, 1.0, pipeline="terapipe", slices=[4, 1, 2])
    check(Grid(1, 2, 2, boxes=[(1, 2, 1)] * 2), fitting(UNEVEN, 2), 2, 1.0)


@pytest.mark.ranks(4)
def test_experts(world):
    """Of which each of the two ranks of a stage has some."""
    shape = dataclasses.replace(MIXTRAL, layers=3, tied=False, experts=3)
    with Grid(1, 2, 2, expert=2, boxes=[(1, 2, 1), (2, 1, 1)]) as grid:
        check(grid, shape, 2, 1.0)


@pytest.mark.ranks(4)
def test_checkpoints_are_of_any_boxes(world, tmp_path):
    """Saved and loaded with other boxes: the same weights, and the same next step."""
    root = world.bcast(tmp_path) / "checkpoints"
    shape = dataclasses.replace(fitting(UNTIED, 2), dropout=0.0)
    order, found = schedule("1f1b", 2, 2), []
    for boxes in ([(2, 1, 1), (1, 2, 1)], [(1, 1, 2), (2, 1, 1)]):
        grid = Grid(1, 2, 2, boxes=boxes)
        model = made(grid, shape, None, order.placement)
        trainer = Trainer(model, grid, make_optimizer(model.parameters(), 0.1), order)
        first, second = (microbatches(grid, batch, step, 2) for step, batch in enumerate(batches(shape, 2)))
        if not found:
            trainer.step(first)
            checkpoint.save(root, 1, model, trainer.strategy)
        else:
            assert checkpoint.load(root, model, trainer.strategy).step == 1
        found.append((trainer.step(second), [whole for _, whole in whole_parameters(model, grid)]))
    (one, weights), (other, loaded) = found
    assert one == pytest.approx(other, rel=1e-12)
    if world.rank == 0:
        torch.testing.assert_close(loaded, weights, rtol=1e-10, atol=1e-12)


@pytest.mark.ranks(4)
def test_the_grid(world):
    grid = Grid(1, 2, 2, boxes=[(2, 1, 1), (1, 1, 2)])
    assert grid.shape["x"] == (2, 1)[grid.pipeline.rank]
    assert [axis.size for axis in (grid.tensor, grid.tensor.x, grid.tensor.y, grid.tensor.z)] == (
        [2, 2, 1, 1] if grid.pipeline.rank == 0 else [2, 1, 1, 2]
    )
    assert grid.members("x") == [[0, 1], [0, 1], [2], [3]][world.rank]
    assert grid.members("pipeline") == [[0, 2], [1, 3]][world.rank % 2]
    assert [grid.place_of(rank)[axis] for rank in range(4) for axis in "xz"] == [0, 0, 1, 0, 0, 0, 0, 1]
    first = grid.plane("y", "z")
    assert (first.rank, first.size) == ([0, 1][world.rank % 2], 2) if world.rank > 1 else (0, 1)
    with pytest.raises(ValueError, match=r"boxes must be 2, one for each stage's ranks, of 2 ranks"):
        Grid(1, 2, 2, boxes=[(2, 1, 1)])
    for shape, order in [(UNEVEN, None), (UNTIED, schedule("chimera", 2, 2).placement)]:
        with pytest.raises(
            ValueError, match=r"pipeline ranks 0, 1 hold the same weights.*got \(2, 1, 1\), \(1, 1, 2\)"
        ):
            made(grid, fitting(shape, 2), None, order)


def test_predicted_bytes(world):
    """Of each stage the rank that receives the most, as a plan has it: its own box, and what is re-partitioned."""
    model = ["model.layers=8", "model.width=32", "model.heads=8", "model.context=8", "model.vocabulary=64",
             "model.tied=false", "train.batch=16", "train.microbatches=2"]  # fmt: skip
    for (data, boxes), grid in zip(BOXES[world.size], grids(world)):
        names = json.dumps(["x".join(map(str, box)) for box in boxes])
        where = [f"grid.data={json.dumps(data)}", f"grid.pipeline={len(boxes)}", f"grid.tensor={list(boxes[0])}"]
        job, choice = read(load_config(overrides=[*model, *where, f"pipeline.boxes={names}"]))
        received, _ = counted(grid, dataclasses.replace(EVEN, tied=False), 16, 2, overlap=job.overlap)
        received["tensor"] = max(grid.tensor.comm.allgather(received["tensor"]))
        assert received == pytest.approx(received_by(job, choice, grid.pipeline.rank), abs=0), boxes


@pytest.mark.ranks(4)
def test_messages_move_what_is_missing(world):
    """A rank of (1,2,1) that is sent its number's rows of (2,1,1) lacks half of its columns' rows."""
    from hpctrain.layers import Tokens, algorithm_of
    from hpctrain.models.between_boxes import BetweenBoxes

    grid = Grid(1, 2, 2, boxes=[(2, 1, 1), (1, 2, 1)])
    between = BetweenBoxes(grid, algorithm_of(grid, "agarwal"), 6)
    tokens = Tokens.of(grid, 2, 4)
    whole = torch.arange(48.0).view(8, 6)
    if grid.pipeline.rank == 1:
        assert between.shape(tokens, 0) == (4, 6)
        x = whole[4 * grid.tensor.rank :][:4]
        grid.transport.traffic.clear()
        assert torch.equal(between.arrive(x, tokens, 0), whole[:, 3 * grid.tensor.rank :][:, :3])
        assert grid.transport.traffic.total("received", axes=("x+y+z",)) == 4 * 4 * 3
