"""Local SGD against independent serial runs whose weights are averaged by hand."""

import functools
from copy import deepcopy
from functools import partial

import pytest
import torch
from replica_checks import ROWS, STEPS, X, Y, grid_of, layers_on, train
from torch import nn
from training_checks import UNEVEN, batches, fitting, microbatches

import hpctrain as ht
from hpctrain import Grid, RngKey
from hpctrain.data_parallel import DataParallel, LocalSGD
from hpctrain.grid_shape import all_grids
from hpctrain.models.gpt2 import GPT2
from hpctrain.shard import split
from hpctrain.train.trainer import Trainer

pytestmark = pytest.mark.mpi

SGD = {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}


@functools.cache
def serial(replicas, every, optimizer, max_norm=0.0, state=False):
    """Each replica by itself, in plain torch; weights and losses."""
    from mpi4py import MPI

    alone = Grid(comm=MPI.COMM_SELF)
    copies = [layers_on(alone) for _ in range(replicas)]
    optimizers = [optimizer(copy.parameters()) for copy in copies]
    losses, norms = [], []
    for step in range(STEPS):
        total, squares = 0.0, 0.0
        for r, (copy, each) in enumerate(zip(copies, optimizers)):
            up, down = copy
            x, y = (t[step, split(ROWS, replicas, r)] for t in (X, Y))
            h = torch.tanh(torch.nn.functional.linear(x, up.weight, up.bias))
            loss = (torch.nn.functional.linear(h, down.weight, down.bias) - y).square().sum() / ROWS
            each.zero_grad()
            (replicas * loss).backward()
            norm = torch.nn.utils.clip_grad_norm_(copy.parameters(), max_norm or float("inf"))
            each.step()
            total, squares = total + loss.item(), squares + norm.item() ** 2
        losses.append(total)
        norms.append((squares / replicas) ** 0.5)
        if (every and (step + 1) % every == 0) or step + 1 == STEPS:
            with torch.no_grad():
                for same in zip(*(copy.parameters() for copy in copies)):
                    mean = torch.stack(same).mean(0)
                    for p in same:
                        p.copy_(mean)
                    if state and step + 1 < STEPS:
                        for key in ("exp_avg", "exp_avg_sq"):
                            tensors = [each.state[p][key] for each, p in zip(optimizers, same)]
                            mean = torch.stack(tensors).mean(0)
                            for t in tensors:
                                t.copy_(mean)
    return dict(copies[0].named_parameters()), losses, norms


def check(grid, got, expected):
    weights, losses, norms, _ = got
    assert losses == pytest.approx(expected[1], rel=1e-12)
    assert norms == pytest.approx(expected[2], rel=1e-12)
    for (name, mine), parameter in zip(weights.items(), layers_on(grid).parameters()):
        torch.testing.assert_close(mine, expected[0][name][parameter.shard.slices], rtol=1e-11, atol=1e-13)


def sgd(parameters):
    return torch.optim.SGD(parameters, **SGD)


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.05)


@pytest.mark.parametrize("state", [False, True])
def test_averages_after_every_step_are_data_parallelism(world, state):
    """With SGD and momentum, whether or not the momentum is averaged too."""
    grid = grid_of(world.size)
    weights, losses, _, _ = train(grid, partial(LocalSGD, every=1, state=state), sgd)
    expected, same, _, _ = train(grid, DataParallel, sgd)
    assert losses == pytest.approx(same, rel=1e-12)
    for name in weights:
        torch.testing.assert_close(weights[name], expected[name], rtol=1e-12, atol=1e-13)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("every", [-1, 2.5])
def test_averages_that_would_never_come(world, every):
    layers = layers_on(grid_of(1))
    with pytest.raises(ValueError, match=f"average_every must be a whole number of steps, or 0, got {every}"):
        LocalSGD(layers.parameters(), grid_of(1), sgd(layers.parameters()), every=every)


@pytest.mark.parametrize("every", [0, 1, 4])
def test_sgd_on_every_grid(world, every):
    """Averages over the data axis alone; a weight's gradient is summed over its tensor axes in every step."""
    for data, pipeline, tensor in all_grids(world.size):
        if pipeline == 1:
            grid = grid_of(data, tensor)
            got = train(grid, partial(LocalSGD, every=every), sgd)
            check(grid, got, serial(data, every, sgd))


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("every", [1, 3])
def test_ranks_that_share_sequences(world, every):
    """Gradients are summed over them in every step, weights averaged over replicas: as where each replica is a rank."""
    shape, results, weights = fitting(UNEVEN, 1), [], []
    replicas = world.size // 2
    for data in (replicas, (replicas, 2, 1), (replicas, 1, 2)):
        alone = isinstance(data, int)
        sub = world.Split(world.rank < replicas if alone else 0)
        grid = Grid(data, comm=sub) if world.rank < replicas or not alone else None
        if grid is not None:
            model = GPT2(grid, shape, key=RngKey(3), dtype=torch.float64)
            optimizer = adam(model.parameters())
            method = LocalSGD(model.parameters(), grid, optimizer, every=every)
            trainer = Trainer(model, grid, optimizer, 2, max_norm=0.5, strategy=method)
            results.append([trainer.step(microbatches(grid, batch, 0, 2)) for batch in batches(shape, 4)])
            with method.full_weights():
                weights.append([p.detach().clone() for p in model.parameters()])
            mine = grid.sequence.comm.allgather([p.detach().numpy().tobytes() for p in model.parameters()])
            assert mine.count(mine[0]) == len(mine)
    expected = world.bcast((results[0], weights[0]))
    for got, found in zip(results, weights):
        for one, two in zip(got, expected[0]):
            assert one == pytest.approx(two, rel=1e-11)
        torch.testing.assert_close(found, expected[1], rtol=1e-9, atol=1e-11)


@pytest.mark.ranks(2, 4)
def test_stages_of_a_pipeline_and_tied_tables(world):
    """Every second step an average, on each stage, of a model whose first and last stages share a table."""
    results, shape = [], fitting(UNEVEN, 2)
    for pipeline in (1, 2):
        grid = Grid(world.size // 2, pipeline, 1, comm=world.Split(world.rank // (pipeline * world.size // 2)))
        model = GPT2(grid, shape, key=RngKey(3), dtype=torch.float64)
        optimizer = sgd(model.parameters())
        method = LocalSGD(model.parameters(), grid, optimizer, every=2)
        trainer = Trainer(model, grid, optimizer, 3, strategy=method)
        results.append([trainer.step(microbatches(grid, batch, 0, 3)) for batch in batches(shape, 4)])
        results[-1].append((trainer.evaluate([microbatches(grid, batches(shape)[0], 0, 3)]), 0.0))
    for one, two in zip(*results):
        assert one == pytest.approx(two, rel=1e-12)


@pytest.mark.ranks(4)
def test_a_plain_module_that_a_tensor_axis_divides(world):
    """Averages in training and for an evaluation in between, after which each replica has its own weights again."""
    torch.manual_seed(0)
    serial = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6)).double()
    copies = [deepcopy(serial) for _ in range(2)]
    grid = grid_of(2, 2)
    model = ht.parallelize(deepcopy(serial), grid)
    optimizer = sgd(model.parameters())

    def loss(model, part):
        step, rows = part
        return (model(X[step, rows]) - Y[step, rows]).square().sum() / ROWS

    def average(models):
        with torch.no_grad():
            for same in zip(*(each.parameters() for each in models)):
                torch._foreach_copy_(same, [torch.stack(same).mean(0)] * 2)

    mine = split(ROWS, 2, grid.data.rank)
    method = LocalSGD(model.parameters(), grid, optimizer, every=2)
    trainer = Trainer(model, grid, optimizer, loss=loss, strategy=method)
    optimizers = [sgd(each.parameters()) for each in copies]
    for step in range(4):
        expected = 0.0
        for rank, (each, own) in enumerate(zip(copies, optimizers)):
            own.zero_grad()
            share = loss(each, (step, split(ROWS, 2, rank)))
            (2 * share).backward()
            own.step()
            expected += share.item()
        assert trainer.step([(step, mine)])[0] == pytest.approx(expected, rel=1e-12)
        if step == 1:
            average(copies)
        average(apart := deepcopy(copies))
        expected = loss(apart[0], (4, slice(0, ROWS))).item()
        assert trainer.evaluate([[(4, mine)]]) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("state", [False, True])
def test_adam_and_clipping(world, state):
    """Each replica clips by its own norm; the optimizer's state is its own, or averaged with the weights."""
    grid = grid_of(world.size)
    got = train(grid, partial(LocalSGD, every=2, state=state), adam, max_norm=0.5)
    check(grid, got, serial(world.size, 2, adam, 0.5, state))


def test_replicas_agree_bit_for_bit_after_an_average_and_keep_their_own_between(world):
    grid = grid_of(world.size)
    for every, alike in ((3, True), (4, world.size == 1)):
        *_, own = train(grid, partial(LocalSGD, every=every), sgd)
        everyone = world.allgather({name: p.numpy().tobytes() for name, p in own.items()})
        assert (everyone.count(everyone[0]) == world.size) is alike
