"""A GPT trained by every schedule: equal to the serial program, alone and together with the other axes."""

import dataclasses
import math

import pytest
import torch
from training_checks import (
    LENGTH,
    UNEVEN,
    batches,
    check,
    check_strategy,
    fitting,
    in_turn,
    logits_of,
    made,
    microbatches,
    serial,
    train_on,
)

from hpctrain import Grid, RngKey
from hpctrain.layers.whole_parameters import whole_parameters
from hpctrain.models.gpt2 import GPT2
from hpctrain.pipeline import StageGraph, list_schedule, schedule
from hpctrain.train.batches import Samples
from hpctrain.train.optimizer import make_optimizer
from hpctrain.train.trainer import Trainer

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 4, 8)]

GRIDS = {
    1: [(1, 1, 1)],
    2: [(1, 2, 1)],
    3: [(1, 3, 1)],
    4: [(1, 4, 1), (2, 2, 1), (1, 2, (1, 1, 2))],
    8: [(2, 2, (2, 1, 1))],
}
SLICED = {2: [(1, 1, (2, 1, 1))], 4: [(1, 2, (2, 1, 1))]}
FLUSH = ("gpipe", "interleaved", "zb-h1", "zb-v", "chimera", "dualpipe", "dualpipev")
EVEN = pytest.mark.ranks(2, 4, 8)  # as chimera takes an even number of ranks
DELAYED = ("pipedream", "pipedream-2bw")


@pytest.mark.ranks(*GRIDS)
@pytest.mark.parametrize(
    ("change", "count", "synchronous"),
    [({}, 3, False), ({"tied": False}, 1, False), ({"dropout": 0.3}, 5, True)],  # batch 5: also empty microbatches
)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=EVEN) if name in ("chimera", "dualpipe") else name for name in FLUSH]
)
def test_equals_serial(world, case, name, change, count, synchronous):
    """Weights, losses and norms after two steps with clipping; tied tables on any ranks, uneven stages."""
    for data, pipeline, tensor in GRIDS[world.size][case % len(GRIDS[world.size]) :: 3]:
        grid = Grid(data, pipeline, tensor)
        grid.transport.synchronous = synchronous
        layers = schedule(name, pipeline, count).graph.stages + 1
        check(grid, dataclasses.replace(UNEVEN, layers=layers, **change), count, 1.0, pipeline=name)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["zb-v", "dualpipev"])
def test_a_table_whose_product_was_put_off(world, name):
    """Cannon's product writes to no bucket by itself: the embedding of the same rank, which does, comes after it."""
    shape = dataclasses.replace(UNEVEN, layers=schedule(name, 2, 3).graph.stages + 1)
    check(Grid(pipeline=2), shape, 3, 1.0, pipeline=name, algorithm="cannon")


@pytest.mark.ranks(*GRIDS)
@pytest.mark.parametrize(("slices", "change"), [([7], {}), ([4, 1, 2], {"dropout": 0.3, "tied": False}), ([1] * 7, {})])
def test_token_slices(world, case, slices, change):
    """TeraPipe: sequences of 7 tokens in slices, with dropout, uneven rows over x and z, and synchronous messages."""
    places = {ranks: found + SLICED.get(ranks, []) for ranks, found in GRIDS.items()}
    for data, pipeline, tensor in in_turn(places, world.size, case):
        grid = Grid(data, pipeline, tensor)
        grid.transport.synchronous = len(slices) == 3
        shape = dataclasses.replace(fitting(UNEVEN, pipeline), **change)
        check(grid, shape, 2, 1.0, pipeline="terapipe", slices=slices)


@pytest.mark.ranks(1, 2, 3, 4)
def test_any_layers_per_stage(world):
    """Stages of very different sizes."""
    layers = world.size + 3
    counts = [1] * (world.size - 1) + [4]
    check(Grid(pipeline=world.size), dataclasses.replace(UNEVEN, layers=layers), 2, 1.0, layers_per_stage=counts)
    with pytest.raises(ValueError, match="layers_per_stage must give at least one block"):
        train_on(Grid(pipeline=world.size), UNEVEN, 2, 1.0, layers_per_stage=[UNEVEN.layers + 1])


@pytest.mark.ranks(3)
@pytest.mark.parametrize("method", ["ddp", "zero1", "zero2"])
def test_ranks_that_share_weights_in_different_orders(world, method):
    """Two replicas of three stages, {(replica, stage): rank}: ranks 0 and 1 share the tied tables and the middle stage,
    which comes after the table on rank 0, before it on rank 1."""
    placement = {(0, 0): 0, (0, 1): 1, (0, 2): 2, (1, 0): 2, (1, 1): 0, (1, 2): 1}
    count, shape = 4, fitting(UNEVEN, 3)
    grid, order = Grid(pipeline=3), list_schedule(StageGraph.chain(3), placement, count)
    model = made(grid, shape, None, order.placement)
    check_strategy(method, model, grid, shape, count, serial(shape, 1.0), order)


def delayed_reference(name, shape, logits_of, stages, weights, count, replicas):
    """SGD in which stage s uses the weights of stages - 1 - s updates ago ("pipedream"), or all stages those of one
    update ago ("pipedream-2bw"); written from the papers, on whole weights, with one history for all."""
    blocks = torch.tensor_split(torch.arange(shape.layers), stages)
    stage_of = {str(int(i)): s for s, part in enumerate(blocks) for i in part}
    stage = {n: 0 if n in ("wte.weight", "wpe.weight") else stages - 1 for n in weights}
    stage |= {n: stage_of[n.split(".")[1]] for n in weights if n.startswith("blocks.")}
    if name == "pipedream":
        groups = [[m] for m in range(count)]
        delay = {n: stages - 1 - s for n, s in stage.items()}
    else:
        groups = [g.tolist() for g in torch.tensor_split(torch.arange(count), max(1, count // stages))]
        delay = dict.fromkeys(weights, 1)
    now = {n: w.clone().requires_grad_() for n, w in weights.items()}
    optimizer = torch.optim.SGD(now.values(), lr=0.1, momentum=0.9)
    losses = []
    for batch in batches(shape):
        parts = [part.tensor_split(count) for part in batch.tensor_split(replicas)]
        history, means = [{n: w.detach().clone() for n, w in now.items()}], []
        for update, group in enumerate(groups):
            used = {n: history[max(0, update - delay[n])][n].clone().requires_grad_() for n in now}
            rows = torch.cat([part[m] for part in parts for m in group])
            logits = logits_of(used, rows[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
            means.append(loss.item())
            for n, gradient in zip(now, torch.autograd.grad(loss, list(used.values()))):
                now[n].grad = gradient
            optimizer.step()
            history.append({n: w.detach().clone() for n, w in now.items()})
        losses.append(sum(means) / len(means))
    return losses, now


@pytest.mark.ranks(*GRIDS)
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("name", DELAYED)
def test_delayed_schedules_are_delayed_sgd(world, name, count):
    for data, pipeline, tensor in GRIDS[world.size]:
        if count > 5 // data:
            continue  # an update without any sequence has no mean loss
        shape = dataclasses.replace(fitting(UNEVEN, pipeline), tied=False)
        grid = Grid(data, pipeline, tensor)
        grid.transport.synchronous = count == 2
        check_delayed(grid, name, shape, logits_of(shape), count)


def check_delayed(grid, name, shape, logits, count):
    data, pipeline = grid.data.size, grid.pipeline.size
    order = schedule(name, pipeline, count)
    model, whole = made(grid, shape), made(alone(), shape)
    weights = {n: p.detach().clone() for n, p in whole.named_parameters()}
    expected, after = delayed_reference(name, shape, logits, pipeline, weights, count, data)
    trainer = Trainer(model, grid, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), order)
    losses = []
    for step, batch in enumerate(batches(shape)):
        parts = [part.tensor_split(count) for part in batch.tensor_split(data)]
        made_of = microbatches(grid, batch, step, count)
        for update in order.updates:
            rows = sum(len(part[m]) for part in parts for m in update)
            for m in update:
                made_of[m] = dataclasses.replace(made_of[m], scale=1 / (rows * LENGTH))
        losses.append(trainer.step(made_of)[0])
    assert losses == pytest.approx(expected, rel=1e-12)
    for n, whole in whole_parameters(model, grid):
        if grid.rank == 0:
            torch.testing.assert_close(whole, after[n], rtol=1e-10, atol=1e-12)


class Text:
    """Tokens without a file."""

    path, tokens = "text", 1000

    masked = False

    def read(self, start, count, out):
        out[:] = range(start, start + count)

    def will_need(self, start, count):
        """There is nothing to read ahead."""


@pytest.mark.parametrize("name", ["1f1b", pytest.param("chimera", marks=EVEN), "pipedream"])
def test_samples_weigh_the_tokens_of_an_update(world, name):
    """The scales of all tokens that share an update add up to one, over replicas; ids and targets are where needed."""
    pipeline = 2 if world.size % 2 == 0 else 1
    grid = Grid(world.size // pipeline, pipeline)
    order = schedule(name, pipeline, 3)
    batch = 7 * grid.data.size
    parts = Samples(Text(), 5, 0.1, RngKey(0)).training_step(grid, 0, batch, order, "cpu", 0)
    for update in order.updates:
        total = sum(parts[m].scale * parts[m].targets.numel() for m in update if parts[m].targets is not None)
        assert world.allreduce(total) == pytest.approx(1, rel=1e-12)
    for m, part in enumerate(parts):
        homes = order.placement[order.replica_of[m], 0], order.placement[order.replica_of[m], order.graph.stages - 1]
        assert [part.ids is not None, part.targets is not None] == [home == grid.pipeline.rank for home in homes]


def alone():
    from mpi4py import MPI

    return Grid(comm=MPI.COMM_SELF)


@pytest.mark.ranks(1, 2)
def test_delayed_schedules_refuse_what_joins_stages(world):
    grid = Grid(pipeline=world.size)
    for tied, clip, message in ((True, 0.0, "untied embeddings"), (False, 1.0, "train.clip=0")):
        if tied and world.size == 1:  # one rank shares its table with nobody
            continue
        shape = dataclasses.replace(UNEVEN, tied=tied)
        model = GPT2(grid, shape, key=RngKey(3), dtype=torch.float64)
        with pytest.raises(ValueError, match=message):
            Trainer(
                model,
                grid,
                make_optimizer(model.parameters(), 0.1),
                schedule("pipedream", world.size, 2),
                max_norm=clip,
            )


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("name", "slices"), [("pipedream", []), ("terapipe", [3, 4])])
def test_what_computes_blocks_once_more(world, name, slices):
    """Backward would use newer weights, or add keys that are there already; attention alone has neither."""
    grid, shape = Grid(pipeline=2), dataclasses.replace(fitting(UNEVEN, 2), tied=False)
    order = schedule(name, 2, 2)
    models = {recompute: made(grid, shape, recompute=recompute) for recompute in ("attention", "block")}
    Trainer(models["attention"], grid, make_optimizer(models["attention"].parameters(), 0.1), order, slices=slices)
    with pytest.raises(ValueError, match=f"{name} .* recompute='block' .*; use recompute='none' or 'attention'"):
        Trainer(models["block"], grid, make_optimizer(models["block"].parameters(), 0.1), order, slices=slices)


@pytest.mark.ranks(2)
def test_slices_are_of_whole_sequences(world):
    grid, shape = Grid(pipeline=2), fitting(UNEVEN, 2)
    model, parts = made(grid, shape), microbatches(grid, batches(shape, 1)[0], 0, 2)

    def trainer(order, slices):
        return Trainer(model, grid, make_optimizer(model.parameters(), 0.1), order, slices=slices)

    for order, slices in ((schedule("terapipe", 2, 2), [2, 3]), (2, [4]), (2, [LENGTH + 1])):
        message = rf"must add up to the tokens of every sequence, {sum(slices)}, got sequences of {LENGTH}$"
        with pytest.raises(ValueError, match=message):
            trainer(order, slices).step(parts)
    assert math.isfinite(trainer(2, [LENGTH]).step(parts)[0])
    for slices in ([LENGTH], [LENGTH + 1, -1]):
        with pytest.raises(ValueError, match="terapipe is made for 2 slices, each of at least a token"):
            trainer(schedule("terapipe", 2, 2), slices)


@pytest.mark.ranks(1, 2)
def test_the_model_must_be_placed_as_scheduled(world):
    grid = Grid(pipeline=world.size)
    model = GPT2(grid, UNEVEN, key=RngKey(3))
    with pytest.raises(ValueError, match="make the model with placement=schedule.placement"):
        Trainer(model, grid, make_optimizer(model.parameters(), 0.1), schedule("zb-v", world.size, 2))
